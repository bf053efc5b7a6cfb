"""Which tokens the filters leave, against transformers' warpers in vLLM's order, and how one of them is picked."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quantpipe.engine.candidates import Candidates, candidates
from quantpipe.engine.sampling_params import SamplingParams


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after transformers' warpers."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    return steps(torch.empty(1, 0, dtype=torch.long), logits[None].clone())[0].softmax(-1)


def dense(found: Candidates, vocab_size: int) -> torch.Tensor:
    ids = np.arange(vocab_size) if found.ids_K is None else found.ids_K
    assert (np.diff(ids) > 0).all()
    probability_V = torch.zeros(vocab_size)
    probability_V[ids] = torch.from_numpy(found.weight_K / found.weight_K.sum())
    return probability_V


@pytest.mark.parametrize("vocab_size", [5, 128, 1000, 20011])
def test_what_is_left_is_what_transformers_leaves(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    choices = itertools.product([0.6, 1.0, 1.7], [0.0, 0.02, 0.4], [0, 1, 7, 300], [0.2, 0.9, 1.0])
    for temperature, min_p, top_k, top_p in choices:
        logits = torch.randn(vocab_size, generator=generator) * 3
        params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        expected = warped(logits, params)
        found = dense(candidates(logits.numpy(), params), vocab_size)
        assert (found > 0).tolist() == (expected > 0).tolist(), params
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)  # float32 sums of thousands of terms


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1200), st.integers(1, 1200), st.integers(1, 40), st.integers(0, 2**32))
def test_top_k_keeps_every_token_that_ties_with_the_last(size: int, top_k: int, num_values: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(0, num_values, size).astype(np.float32)
    found = candidates(logits, SamplingParams(temperature=1.0, top_k=top_k))
    threshold = np.sort(logits)[::-1][min(top_k, size) - 1]
    ids = np.arange(size) if found.ids_K is None else found.ids_K
    assert ids.tolist() == np.flatnonzero(logits >= threshold).tolist()


def test_ties_at_the_threshold_of_each_filter_are_kept() -> None:
    logits = np.log(np.array([0.4, 0.2, 0.2, 0.1, 0.1], dtype=np.float32))
    for changes, kept in (
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_p": 0.5}, [0, 1, 2]),
        ({"min_p": 0.49}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_p": 1e-9}, [0]),
    ):
        found = candidates(logits, SamplingParams(temperature=1.0, **changes)).ids_K
        assert found is not None and found.tolist() == kept, changes


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**32), st.floats(0, 1, exclude_max=True))
def test_pick_inverts_the_cumulative_distribution(size: int, seed: int, draw: float) -> None:
    rng = np.random.default_rng(seed)
    weight_K = (rng.random(size, dtype=np.float32) ** 8) * (rng.random(size) < 0.5)
    weight_K[rng.integers(size)] = 1.0
    index = Candidates(None, weight_K.astype(np.float32)).pick(draw)
    mass = np.cumsum(weight_K, dtype=np.float64) / weight_K.sum(dtype=np.float64)
    assert weight_K[index] > 0
    # Groups are summed in float32: a share of 1e-7 may fall on the other side of an edge.
    assert mass[index] >= draw - 1e-6
    assert index == 0 or mass[index - 1] <= draw + 1e-6


def test_draws_at_the_ends_of_the_interval_pick_the_first_and_last_token_that_has_weight() -> None:
    weight_K = np.zeros(500, dtype=np.float32)
    weight_K[[3, 140, 400]] = [1e-30, 1.0, 1e-30]
    found = Candidates(None, weight_K)
    assert found.pick(0.0) == 3
    assert found.pick(0.5) == 140
    assert Candidates(None, weight_K[:399]).pick(1 - 2**-53) == 140
    assert Candidates(np.array([7, 9]), np.array([1, 1], dtype=np.float32)).pick(1 - 2**-53) == 9
