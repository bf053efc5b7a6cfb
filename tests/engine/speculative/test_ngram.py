"""Prompt lookup: what it finds, and that a call's work does not grow with the sequence."""

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.engine.request import Request, SamplingParams, Sequence
from quantpipe.engine.speculative import ngram
from quantpipe.engine.speculative.ngram import MAX_INDEXED_TOKENS, NgramDrafter, NgramIndex


def propose(token_ids: list[int], num: int = 4, min_ngram: int = 2, max_ngram: int = 5) -> tuple[int, ...]:
    return NgramIndex(min_ngram, max_ngram).propose(token_ids, num)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2]) == (3, 4, 5, 6)
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2], num=2) == (3, 4)


def test_nothing_is_proposed_without_a_match_or_a_wish() -> None:
    assert propose([1, 2, 3, 4, 5]) == ()
    assert propose([1, 2, 3, 1, 2], num=0) == ()
    assert propose([1], num=3) == ()
    assert propose([], num=3) == ()
    assert propose([1, 2, 9, 3, 2], num=3) == ()  # one token alone is no match


def test_longest_match_wins_and_then_the_latest() -> None:
    assert propose([7, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], num=1) == (30,)
    assert propose([5, 1, 2, 30, 8, 1, 2, 40, 7, 1, 2], num=1) == (40,)


def test_a_period_is_continued_beyond_what_is_there() -> None:
    assert propose([4, 4, 4], num=5) == (4,) * 5
    assert propose([9, 1, 2, 3, 1, 2, 3], num=7) == (1, 2, 3, 1, 2, 3, 1)


def brute_force(token_ids: list[int], num: int, min_ngram: int, max_ngram: int) -> tuple[int, ...]:
    """The longest match, the latest of those, among the latest places."""
    tail = token_ids[-min_ngram:]
    places = [
        end
        for end in range(min_ngram, len(token_ids))
        if len(tail) == min_ngram and token_ids[end - min_ngram : end] == tail
    ]
    found: list[tuple[int, int]] = []
    for place in places[-ngram.MAX_PLACES :]:
        length = min_ngram
        while length < min(max_ngram, place) and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        found.append((length, place))
    if not found or num < 1:
        return ()
    copied = list(token_ids)
    for offset in range(num):
        copied.append(copied[max(found)[1] + offset])
    return tuple(copied[len(token_ids) :])


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 6), st.integers(1, 3), st.integers(0, 4), st.data())
def test_index_kept_token_by_token_finds_what_a_scan_of_everything_does(
    token_ids: list[int], num: int, min_ngram: int, spare: int, data: st.DataObject
) -> None:
    index = NgramIndex(min_ngram, min_ngram + spare)
    end = 0
    while end < len(token_ids):
        end = min(len(token_ids), end + data.draw(st.integers(1, 20)))
        so_far = token_ids[:end]
        assert index.propose(so_far, num) == brute_force(so_far, num, min_ngram, min_ngram + spare)


class CountedList(list[int]):
    """Counts how often it is read."""

    num_reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        self.num_reads += 1
        return super().__getitem__(key)


def test_work_of_a_call_is_bounded_whatever_the_length() -> None:
    token_ids = CountedList([1, 2, 3] * 20_000)
    index = NgramIndex()
    for _ in range(200):
        token_ids.num_reads = 0
        assert index.propose(token_ids, 4) == ((1, 2, 3, 1) if len(index._earlier) else ())
        assert token_ids.num_reads < 2 * MAX_INDEXED_TOKENS
    token_ids.append(1)
    token_ids.num_reads = 0
    assert index.propose(token_ids, 4) == (2, 3, 1, 2)
    assert token_ids.num_reads < 100


def test_each_sequence_has_an_index_of_its_own_until_it_ends() -> None:
    drafter = NgramDrafter(min_ngram=2)
    params = SamplingParams()
    first, second = (
        Sequence(Request("r", tuple(prompt), params), list(prompt)) for prompt in ([1, 2, 3, 1, 2], [1, 2, 4, 1, 2])
    )
    assert drafter.propose([(first, 1), (second, 2)]) == [(3,), (4, 1)]
    assert drafter.propose([]) == []
    drafter.forget(first)
    drafter.forget(first)
    assert list(drafter._indexes) == [second]
