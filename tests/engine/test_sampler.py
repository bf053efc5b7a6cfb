"""Sampling: the right distribution and the right filters, whatever else is in the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import is_usable, sample, token_logprobs
from quantpipe.engine.sampling_params import SamplingParams

PROBABILITIES = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
INF, NAN = math.inf, math.nan


def sampled(params: SamplingParams, num: int = 4000, logits: torch.Tensor | None = None) -> torch.Tensor:
    """Frequencies of the tokens drawn from one row of logits at ``num`` different seeds."""
    row = PROBABILITIES.log() if logits is None else logits
    token_ids = sample(row.expand(num, -1).numpy(), [Sampled(params, seed=seed) for seed in range(num)])
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
    token_ids = sample(logits.expand(300, -1).numpy(), [Sampled(params, seed=seed) for seed in range(300)])
    found = sorted(token_id for token_id in token_ids if token_id is not None)
    assert len(found) == 300
    assert 2000 <= found[0] < 2100
    assert found[-1] > 4900


def test_temperature_zero_is_greedy_and_mixes_with_sampled_rows() -> None:
    logits_RV = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    requests = [Sampled(SamplingParams(temperature=0.0 if row % 2 else 100.0), seed=row) for row in range(6)]
    token_ids = sample(logits_RV.numpy(), requests)
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


mappings = st.dictionaries(st.integers(0, 1199), st.floats(-100, 100), max_size=5)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 1100]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, 2.0]),
    logit_bias=st.just({}) | mappings,
    min_tokens=st.sampled_from([0, 3, 9]),
    stop_token_ids=st.lists(st.integers(0, 1199), max_size=3).map(tuple),
)
histories = st.lists(st.integers(0, 1199), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.tuples(all_params, histories, histories), min_size=1, max_size=7), st.data())
def test_choice_does_not_depend_on_the_rest_of_the_batch_nor_on_its_order(
    seed: int, plans: list[tuple[SamplingParams, list[int], list[int]]], data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RV = (torch.randn(len(plans), 1200, generator=generator) * 3).half().float().numpy()  # rounded: many ties
    requests = [
        Sampled(params, prompt_ids, seed + row, eos_token_ids=(7,)).after(generated_ids)
        for row, (params, prompt_ids, generated_ids) in enumerate(plans)
    ]
    alone = [sample(logits_RV[row : row + 1].copy(), [own])[0] for row, own in enumerate(requests)]
    order = data.draw(st.permutations(range(len(plans))))
    assert sample(logits_RV[order], [requests[row] for row in order]) == [alone[row] for row in order]
    entries = token_logprobs(logits_RV[order], [5] * len(order), 4)
    assert entries == [token_logprobs(logits_RV[row : row + 1].copy(), [5], 4)[0] for row in order]


def test_choosing_changes_no_logits() -> None:
    logits_RV = np.random.default_rng(0).standard_normal((2, 300), dtype=np.float32)
    before_RV = logits_RV.copy()
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, logit_bias={3: 5.0}, top_k=3, min_p=0.1, top_p=0.9)
    sample(logits_RV, [Sampled(params, [1, 2, 3]), Sampled(SamplingParams(presence_penalty=1.0), [1])])
    np.testing.assert_array_equal(logits_RV, before_RV)


def test_penalties_and_bias_move_the_greedy_choice() -> None:
    logits_RV = np.array([[1.0, 3.0, 2.0, -1.0]] * 5, dtype=np.float32)
    requests = [
        Sampled(SamplingParams(repetition_penalty=2.0), [1]),  # 3 / 2 is below 2
        Sampled(SamplingParams(presence_penalty=1.5), [1]),  # the prompt does not count
        Sampled(SamplingParams(presence_penalty=1.5)).after([1]),
        Sampled(SamplingParams(logit_bias={3: 4.5})),
        Sampled(SamplingParams(min_tokens=2), eos_token_ids=[1]).after([0]),
    ]
    assert sample(logits_RV, requests) == [2, 1, 2, 3, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_that_leaves_nothing_to_choose_gives_none_and_the_others_their_token(temperature: float) -> None:
    rows = [[NAN, 1.0], [0.0, 2.0], [-INF, 2.0], [3e38, 1.0], [-INF, 1.0]]
    requests = [
        Sampled(SamplingParams(temperature=temperature)),
        Sampled(SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=(0, 1))),
        Sampled(SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=(1,))),
        Sampled(SamplingParams(temperature=temperature, repetition_penalty=1e-9), [0]),  # too large to say, yet a token
        Sampled(SamplingParams(temperature=temperature)),
    ]
    assert sample(np.array(rows, dtype=np.float32), requests) == [None, None, None, 0, 1]


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
