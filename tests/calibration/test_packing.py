"""Choosing and cutting samples, against a plain sort of everything."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.calibration.packing import Selection

SAMPLES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=60)


@given(samples=SAMPLES, num_sequences=st.integers(1, 8), sequence_length=st.integers(1, 10), seed=st.integers(0, 99))
def test_bounded_choice_equals_sorting_all_samples(
    samples: list[tuple[int, int]], num_sequences: int, sequence_length: int, seed: int
) -> None:
    rng = random.Random(seed)
    offered = [(rng.choice((rng.random(), 0.5)), source, [i] * size) for i, (source, size) in enumerate(samples)]
    selection = Selection(num_sequences * sequence_length, 3)
    for rank, source, token_ids in offered:
        selection.offer(source, rank, token_ids)
    packed = selection.pack(["a", "b", "c"], sequence_length)

    everything = [token for _, _, token_ids in sorted(offered, key=lambda each: each[0]) for token in token_ids]
    num_expected = min(num_sequences, len(everything) // sequence_length)
    assert packed.token_ids.shape == (num_expected, sequence_length)
    assert packed.token_ids.ravel().tolist() == everything[: num_expected * sequence_length]
    assert sum(source.num_tokens_used for source in packed.account) == packed.token_ids.size
    assert sum(source.num_tokens_available for source in packed.account) == len(everything)
    assert sum(source.num_samples_available for source in packed.account) == len(samples)
    assert sum(source.num_samples_truncated for source in packed.account) <= 1
    assert packed.num_samples_used == len(set(packed.token_ids.ravel().tolist()))


def test_memory_follows_the_budget_and_not_the_set() -> None:
    selection, rng = Selection(1_000, 1), random.Random(0)
    most_held = 0
    for _ in range(20_000):
        selection.offer(0, rng.random(), [1] * 10)
        most_held = max(most_held, len(selection._held))
    assert most_held == 100
    assert selection.num_tokens_available == 200_000


def test_equal_texts_count_once_as_distinct() -> None:
    selection = Selection(30, 1)
    for rank, token_ids in enumerate(([1, 2, 3], [1, 2, 3], [4, 5, 6])):
        selection.offer(0, rank, token_ids)
    packed = selection.pack(["a"], 3)
    assert (packed.num_samples_used, packed.num_samples_distinct) == (3, 2)
    assert np.array_equal(packed.token_ids, [[1, 2, 3], [1, 2, 3], [4, 5, 6]])
