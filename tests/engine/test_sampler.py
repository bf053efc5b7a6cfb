"""Sampling: the right distribution, the right filters, and draws that depend on seed and index alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.request import SamplingParams
from quantpipe.engine.sampler import is_usable, sample, token_logprobs, uniform

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
INF, NAN = math.inf, math.nan


def sampled(params: SamplingParams, num: int = 4000, logits: torch.Tensor | None = None) -> torch.Tensor:
    """Frequencies of the tokens drawn from one row of logits at ``num`` different seeds."""
    row = PROBABILITIES.log() if logits is None else logits
    token_ids = sample(row.expand(num, -1).numpy(), [params] * num, [uniform(seed, 0) for seed in range(num)])
    return torch.bincount(torch.tensor(token_ids), minlength=len(row)) / num


# Four standard deviations of a frequency at 4,000 draws are at most 4 * sqrt(0.25 / 4000) = 0.032.
TOLERANCE = 0.032


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    expected = (PROBABILITIES.log() / temperature).softmax(-1)
    torch.testing.assert_close(sampled(SamplingParams(temperature=temperature)), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (1, 1.0, [1]),
        (2, 1.0, [1, 3]),
        (5, 1.0, [0, 1, 2, 3, 4]),
        (99, 1.0, [0, 1, 2, 3, 4]),
        (0, 0.01, [1]),
        (0, 0.39, [1]),
        (0, 0.5, [1, 3]),
        (0, 0.69, [1, 3]),
        (0, 0.8, [1, 3, 4]),
        (0, 0.9999, [0, 1, 2, 3, 4]),
        (3, 0.8, [1, 3]),  # of the three kept by top-k, 0.7 / 0.85 = 0.82 already reaches 0.8
        (3, 0.83, [1, 3, 4]),
    ],
)
def test_filters_keep_the_most_likely_and_renormalise(top_k: int, top_p: float, kept: list[int]) -> None:
    frequencies = sampled(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p))
    expected = torch.zeros(5)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    torch.testing.assert_close(frequencies, expected, atol=TOLERANCE, rtol=0)
    assert (frequencies > 0).tolist() == (expected > 0).tolist()


def test_nucleus_of_thousands_of_tokens_is_found() -> None:
    logits = torch.linspace(0, 1e-3, 5000)
    params = SamplingParams(temperature=1.0, top_p=0.6)
    token_ids = sample(logits.expand(300, -1).numpy(), [params] * 300, [uniform(seed, 0) for seed in range(300)])
    assert 2000 <= min(token_ids) < 2100
    assert max(token_ids) > 4900


def test_temperature_zero_is_greedy_and_mixes_with_sampled_rows() -> None:
    logits_RV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0.0 if row % 2 else 1.0) for row in range(6)]
    token_ids = sample(logits_RV.numpy(), params, [0.999] * 6)
    assert token_ids[1::2] == logits_RV.argmax(-1)[1::2].tolist()
    assert token_ids[::2] != logits_RV.argmax(-1)[::2].tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-3, 1e3, 1e300])
def test_extreme_temperatures_neither_overflow_nor_leave_the_vocabulary(temperature: float) -> None:
    frequencies = sampled(SamplingParams(temperature=temperature), logits=torch.tensor([-50.0, 80.0, 79.0, -INF]))
    assert frequencies.sum() == 1
    assert frequencies[3] == 0
    if temperature < 1:
        assert frequencies[1] == 1
    else:
        torch.testing.assert_close(frequencies[:3], torch.full((3,), 1 / 3), atol=TOLERANCE + 0.02, rtol=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7), st.data())
def test_draw_does_not_depend_on_the_rest_of_the_batch(seed: int, num_rows: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = (torch.randn(num_rows, 1200, generator=generator) * 3).half().float()  # rounded: ties are common
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0, 5.0])),
            top_k=data.draw(st.sampled_from([0, 1, 5, 1100])),
            top_p=data.draw(st.sampled_from([0.1, 0.9, 0.999, 1.0])),
        )
        for _ in range(num_rows)
    ]
    draws = [uniform(seed, row) for row in range(num_rows)]
    alone = [sample(logits_RV[row : row + 1].numpy(), [params[row]], [draws[row]])[0] for row in range(num_rows)]
    assert sample(logits_RV.numpy(), params, draws) == alone


def test_draws_at_the_ends_of_the_interval_stay_in_the_vocabulary() -> None:
    logits_RV = np.array([[-INF, 0.0, 1.0, -INF]] * 2, dtype=np.float32)
    assert sample(logits_RV, [SamplingParams(temperature=1.0)] * 2, [0.0, 1 - 2**-53]) == [1, 2]


def test_uniform_numbers_are_reproducible_even_and_uncorrelated() -> None:
    for numbers in ([uniform(7, index) for index in range(4000)], [uniform(seed, 3) for seed in range(4000)]):
        values = torch.tensor(numbers, dtype=torch.float64)
        assert values.min() >= 0 and values.max() < 1
        counts = torch.histc(values, bins=10, min=0, max=1)
        assert (counts - 400).abs().max() < 4 * math.sqrt(400)
        assert abs(float(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1])) < 4 / math.sqrt(4000)
    assert uniform(7, 3) == uniform(7, 3) != uniform(-7, 3)
    assert uniform(0, 1) != uniform(1, 0)


def test_rows_without_a_largest_logit_are_unusable() -> None:
    rows = [[0.0, 1.0], [NAN, 1.0], [0.0, NAN], [INF, 0.0], [-INF, 0.0], [-INF, -INF]]
    assert is_usable(np.array(rows, dtype=np.float32)) == [True, False, False, False, True, False]
    assert is_usable(np.empty((0, 2), dtype=np.float32)) == []


def test_logprobs_equal_log_softmax_over_several_chunks_of_rows() -> None:
    logits_RV = torch.randn(150, 40, generator=torch.Generator().manual_seed(1)) * 5
    token_ids = [row % 40 for row in range(150)]
    found = token_logprobs(logits_RV.numpy(), token_ids, num_top=3)
    expected_RV = logits_RV.log_softmax(-1)
    for row, entry in enumerate(found):
        # float32 rounding of a sum of 40 terms
        assert entry.logprob == pytest.approx(float(expected_RV[row, token_ids[row]]), abs=1e-5)
        assert entry.is_greedy == (int(logits_RV[row].argmax()) == token_ids[row])
        assert [token_id for token_id, _ in entry.top] == expected_RV[row].topk(3).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected_RV[row].topk(3).values.tolist(), abs=1e-5)


def test_more_alternatives_than_the_vocabulary_gives_all_of_it() -> None:
    [entry] = token_logprobs(np.array([[0.0, 1.0]], dtype=np.float32), [0], num_top=20)
    assert [token_id for token_id, _ in entry.top] == [1, 0]
