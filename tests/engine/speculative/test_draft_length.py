"""Guessing less where it does not pay."""

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.engine.speculative.draft_length import LONGEST_PAUSE, DraftLength


def test_length_follows_what_proves_right() -> None:
    length = DraftLength(8)
    assert length.next() == 8
    length.observe(8, 2)
    assert length.next() == 3
    length.observe(3, 3)
    assert length.next() == 6
    length.observe(6, 6)
    assert length.next() == 8


def test_a_guess_cut_short_by_lack_of_room_does_not_shorten_the_next() -> None:
    length = DraftLength(8)
    length.observe(1, 1)
    assert length.next() == 8


def test_misses_in_a_row_make_pauses_longer_and_one_hit_ends_them() -> None:
    length = DraftLength(4)
    pauses = []
    for _ in range(8):
        length.observe(1, 0)
        pauses.append(0)
        while length.next() == 0:
            pauses[-1] += 1
    assert pauses == [0, 1, 2, 4, 8, 16, 16, 16]
    length.observe(1, 1)
    assert length.next() == 2


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=40))
def test_length_stays_within_its_bounds(most: int, seen: list[tuple[int, int]]) -> None:
    length = DraftLength(most)
    for num_drafted, num_accepted in seen:
        length.observe(num_drafted, min(num_accepted, num_drafted))
        tries = [length.next() for _ in range(LONGEST_PAUSE + 1)]
        assert 1 <= max(tries) <= most
