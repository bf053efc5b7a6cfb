"""Counts of distinct tokens, kept token by token."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.engine.token_counts import TokenCounts

few_ids = st.lists(st.integers(0, 200), max_size=300)


def as_dict(counts: TokenCounts) -> dict[int, int]:
    ids, num_times = counts.ids_U.tolist(), counts.num_times_U.tolist()
    assert len(set(ids)) == len(ids) == len(num_times)
    return dict(zip(ids, num_times, strict=True))


@given(few_ids, few_ids)
def test_counts_are_those_of_the_generated_tokens_and_the_prompts_are_there_with_zero(
    prompt_ids: list[int], generated_ids: list[int]
) -> None:
    counts = TokenCounts(prompt_ids)
    for token_id in generated_ids:
        counts.add(token_id)
    assert as_dict(counts) == dict.fromkeys(prompt_ids, 0) | Counter(generated_ids)


@given(few_ids, few_ids)
def test_copy_goes_on_by_itself(first: list[int], second: list[int]) -> None:
    counts = TokenCounts()
    for token_id in first:
        counts.add(token_id)
    twin = counts.copy()
    for token_id in second:
        twin.add(token_id)
    assert as_dict(counts) == Counter(first)
    assert as_dict(twin) == Counter(first + second)
