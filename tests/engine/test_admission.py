"""What each rule has room for. The peak is compared with a simulation that lets every sequence run to its end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.engine.admission import (
    ADMISSIONS,
    NUM_REMEMBERED_LENGTHS,
    NUM_TELLING_LENGTHS,
    Candidate,
    OutputLengths,
)
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.request import Request, SamplingParams, Sequence

BLOCK = 4


def sequence(number: int, num_prompt: int, num_generated: int, max_tokens: int, num_forks: int = 0) -> Sequence:
    request = Request("r", (1,) * num_prompt, SamplingParams(max_tokens=max_tokens))
    seq = Sequence(request, [1] * (num_prompt + num_generated), number=number, num_pending_forks=num_forks)
    seq.block_table = [0] * num_blocks(seq.num_tokens)
    return seq


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def waiting(number: int, num_prompt: int, max_tokens: int, num_forks: int = 0) -> Candidate:
    seq = sequence(number, num_prompt, 0, max_tokens, num_forks)
    seq.block_table = []
    return Candidate(seq, num_blocks(num_prompt), 0)


def lengths_of(*lengths: int) -> OutputLengths:
    known = OutputLengths()
    for length in lengths:
        known.record(length)
    return known


def least_available(name: str, running: list[Sequence], candidate: Candidate, lengths: OutputLengths) -> int:
    room = ADMISSIONS[name](running, AttentionWindow(BLOCK), lengths)
    return next(num for num in range(100_000) if room.admits(candidate, num))


def test_greedy_leaves_a_block_for_each_that_runs() -> None:
    running = [sequence(number, 5, 2, 100) for number in range(3)]
    assert least_available("greedy", running, waiting(3, 9, 100), OutputLengths()) == 3 + 3


def test_reserve_has_room_for_the_longest_outputs_of_all() -> None:
    running = [sequence(0, 5, 2, 11), sequence(1, 8, 4, 5)]  # may come to hold 15 and 12 tokens
    room = ADMISSIONS["reserve"](running, AttentionWindow(BLOCK), OutputLengths())
    first, second = waiting(2, 9, 8), waiting(3, 4, 1)  # 16 and 4
    assert least_available("reserve", running, first, OutputLengths()) == (4 - 2) + 0 + 4
    room.add(first)
    num_later = (4 - 2) + (4 - 3)
    assert not room.admits(second, num_later) and room.admits(second, num_later + 1)


def test_reserve_counts_forks_beyond_the_prompt_blocks_they_share() -> None:
    candidate = waiting(0, 10, 7, num_forks=2)  # each of 3 has 4 blocks in the end, 2 of them shared
    assert least_available("reserve", [], candidate, OutputLengths()) == 4 + 2 * 2


@pytest.mark.parametrize("name", ["reserve", "peak"])
def test_of_windows_what_is_held_counts_and_not_what_is_generated(name: str) -> None:
    window = AttentionWindow(BLOCK, num_sinks=3, asked=10, widest=10, reach=9, max_chunk=6)
    assert window.most_blocks(None) == 6
    running = [sequence(number, 40, 400, 100_000) for number in range(3)]
    for seq in running:  # they hold 4 of the 6 blocks that they may come to
        seq.num_computed_tokens, seq.num_dropped_blocks, seq.block_table = 439, 106, [0] * 4
    candidate = Candidate(sequence(3, 500, 0, 100_000), num_missing=2, num_unheld=0)
    candidate.seq.block_table = []
    room = ADMISSIONS[name](running, window, OutputLengths())
    assert not room.admits(candidate, 11) and room.admits(candidate, 3 * 2 + 6)
    room.add(candidate)
    assert not room.admits(candidate, 15) and room.admits(candidate, 3 * 2 + 4 + 6)


runners = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 40)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=6,
)


@given(runners, st.integers(1, 30), st.integers(1, 40))
def test_peak_is_enough_and_nearly_least_where_everyone_uses_max_tokens(
    sizes: list[tuple[int, int, int]], num_prompt: int, max_tokens: int
) -> None:
    running = [sequence(number, *size) for number, size in enumerate(sizes)]
    candidate = waiting(len(sizes), num_prompt, max_tokens)
    found = least_available("peak", running, candidate, OutputLengths())

    everyone = [*running, candidate.seq]
    left = [seq.request.params.max_tokens - seq.num_generated_tokens for seq in everyone]
    held_now = sum(len(seq.block_table) for seq in running)
    held = [
        sum(num_blocks(seq.num_tokens + step) for seq, num in zip(everyone, left, strict=True) if step < num)
        for step in range(max(left) + 1)
    ]
    needed = max(max(held) - held_now, candidate.num_missing)
    assert needed <= found <= needed + len(everyone)


def test_peak_expects_outputs_as_long_as_those_of_late() -> None:
    running = [sequence(number, 8, 4, 1000) for number in range(8)]
    candidate = waiting(8, 8, 1000)
    unknown, short, long = OutputLengths(), lengths_of(*[12] * 50), lengths_of(*[500] * 50)
    needs = [least_available("peak", running, candidate, lengths) for lengths in (short, long, unknown)]
    assert needs[0] < 40 < 1000 < needs[1] < needs[2]


def test_output_longer_than_all_of_late_is_expected_to_use_max_tokens() -> None:
    lengths = lengths_of(*range(1, 101))
    remaining = lengths.remaining(
        np.array([0, 50, 99, 100, 150]), np.array([30, 1000, 1000, 1000, 160]), np.full(5, 0.5)
    )
    assert remaining.tolist() == [30, 26, 1, 900, 10]


def test_lengths_tell_nothing_until_there_are_enough_and_old_ones_are_forgotten() -> None:
    lengths = lengths_of(*[10] * (NUM_TELLING_LENGTHS - 1))
    assert lengths.expected(400) == 400
    lengths.record(10)
    assert (lengths.expected(400), lengths.expected(3)) == (10, 3)
    for _ in range(NUM_REMEMBERED_LENGTHS):
        lengths.record(70)
    assert lengths.expected(400) == 70


@pytest.mark.parametrize("name", ADMISSIONS)
def test_more_forks_never_need_less(name: str) -> None:
    needs = [least_available(name, [], waiting(0, 10, 20, num_forks), OutputLengths()) for num_forks in range(4)]
    assert needs == sorted(needs) and needs[0] < needs[3]
