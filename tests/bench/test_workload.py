"""Prompts have exact lengths, come from the seed alone, and do not share prefixes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.bench.workload import text_prompts, vocabulary_text
from quantpipe.errors import DataError


@given(num_prompts=st.integers(1, 20), prompt_tokens=st.integers(1, 50), seed=st.integers(0, 5))
def test_prompts_are_distinct_windows_of_the_text_of_exact_length(
    num_prompts: int, prompt_tokens: int, seed: int
) -> None:
    source = range(200)
    prompts = text_prompts(source, num_prompts, prompt_tokens, seed)
    assert prompts == text_prompts(source, num_prompts, prompt_tokens, seed)
    assert all(prompt == tuple(range(prompt[0], prompt[0] + prompt_tokens)) for prompt in prompts)
    assert len({prompt[0] for prompt in prompts}) == num_prompts


def test_another_seed_gives_other_prompts_and_the_callers_random_state_is_untouched() -> None:
    random.seed(1)
    before = random.getstate()
    assert text_prompts(range(1000), 4, 8, seed=0) != text_prompts(range(1000), 4, 8, seed=1)
    vocabulary_text(100, (), 10, seed=0)
    assert random.getstate() == before


def test_a_text_with_exactly_enough_windows_is_enough_and_one_token_less_is_refused() -> None:
    assert len(text_prompts(range(12), 5, 8, seed=0)) == 5
    with pytest.raises(DataError, match="11 tokens has no 5 windows of 8 tokens"):
        text_prompts(range(11), 5, 8, seed=0)


def test_drawn_ids_cover_the_vocabulary_without_special_tokens() -> None:
    ids = vocabulary_text(50, special_ids=(0, 1, 49), num_tokens=2000, seed=3)
    assert len(ids) == 2000
    assert set(ids) == set(range(2, 49))
    assert ids == vocabulary_text(50, (49, 1, 0), 2000, seed=3)


def test_a_vocabulary_of_special_tokens_only_is_refused() -> None:
    with pytest.raises(DataError, match="special tokens only"):
        vocabulary_text(2, (0, 1), 5, seed=0)
