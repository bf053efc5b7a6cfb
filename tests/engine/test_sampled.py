"""Minimum length, bias and penalties against transformers' processors, in vLLM's order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from quantpipe.engine.draws import uniform
from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampling_params import SamplingParams

VOCAB = 60
EOS = 11
token_ids = st.integers(0, VOCAB - 1)
histories = st.lists(token_ids, min_size=1, max_size=80)


def dense(logits: torch.Tensor, params: SamplingParams, prompt_ids: list[int], generated_ids: list[int]) -> np.ndarray:
    """The same from the whole history at once: transformers' processors, then vLLM's two additive penalties."""
    steps = LogitsProcessorList()
    stop_ids = [EOS, *params.stop_token_ids]
    steps.append(MinNewTokensLengthLogitsProcessor(len(prompt_ids), params.min_tokens, stop_ids, device="cpu"))
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(key,): float(value) for key, value in params.logit_bias.items()}))
    steps.append(RepetitionPenaltyLogitsProcessor(penalty=params.repetition_penalty))
    found = steps(torch.tensor([prompt_ids + generated_ids]), logits[None].clone())[0]
    num_times = torch.bincount(torch.tensor(generated_ids, dtype=torch.long), minlength=VOCAB)
    found = found - params.frequency_penalty * num_times
    return (found - params.presence_penalty * (num_times > 0)).numpy()


@settings(max_examples=80, deadline=None)
@given(
    st.builds(
        SamplingParams,
        min_tokens=st.integers(0, 40),
        repetition_penalty=st.sampled_from([0.7, 1.0, 1.1, 2.0]),
        presence_penalty=st.sampled_from([-2.0, 0.0, 0.6, 2.0]),
        frequency_penalty=st.sampled_from([-0.3, 0.0, 0.1, 2.0]),
        logit_bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32), max_size=6),
        stop_token_ids=st.lists(token_ids, max_size=3).map(tuple),
    ),
    histories,
    st.lists(token_ids, max_size=80),
    st.integers(0, 2**32),
)
def test_adjusted_logits_are_those_of_transformers_processors_at_every_length(
    params: SamplingParams, prompt_ids: list[int], generated_ids: list[int], seed: int
) -> None:
    own = Sampled(params, prompt_ids, eos_token_ids=[EOS])
    generator = torch.Generator().manual_seed(seed)
    for num in range(len(generated_ids) + 1):
        if num:
            own.append(generated_ids[num - 1])
        logits = torch.randn(VOCAB, generator=generator) * 5
        adjusted = own.adjust(logits.numpy())
        # The same float32 operations one after another; transformers adds its biases through a tensor of zeros.
        np.testing.assert_allclose(adjusted, dense(logits, params, prompt_ids, generated_ids[:num]), rtol=1e-6)
        assert own.is_adjusted or np.array_equal(adjusted, logits.numpy())


def test_only_what_asks_for_it_is_adjusted() -> None:
    assert not Sampled(SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1), [1, 2]).is_adjusted
    assert not Sampled(SamplingParams(ignore_eos=True, stop_token_ids=(3,))).is_adjusted
    waiting = Sampled(SamplingParams(min_tokens=1))
    assert waiting.is_adjusted
    assert not waiting.after([5]).is_adjusted


def test_minimum_length_holds_back_the_end_even_where_it_is_ignored() -> None:
    own = Sampled(SamplingParams(min_tokens=1, ignore_eos=True, stop_token_ids=(2,)), eos_token_ids=[0])
    assert own.adjust(np.ones(4, dtype=np.float32)).tolist() == [-np.inf, 1.0, -np.inf, 1.0]


@pytest.mark.parametrize("penalty", [1e-308, 1e-40, 1e308])
def test_penalties_as_extreme_as_can_be_asked_for_leave_a_token_to_choose(penalty: float) -> None:
    own = Sampled(SamplingParams(min_tokens=1, repetition_penalty=penalty), [1, 2], eos_token_ids=[0, 2])
    adjusted = own.adjust(np.array([5, 3, -2, -7], dtype=np.float32))
    assert adjusted[[0, 2]].tolist() == [-np.inf, -np.inf]
    assert np.isfinite(adjusted[[1, 3]]).all()


def test_each_token_has_a_draw_of_its_own_and_looking_ahead_changes_nothing() -> None:
    own = Sampled(SamplingParams(frequency_penalty=1.0), [1], seed=9)
    ahead = own.after([4, 4, 5])
    assert (own.draw, ahead.draw) == (uniform(9, 0), uniform(9, 3))
    row = np.zeros(6, dtype=np.float32)
    assert own.adjust(row).tolist() == [0.0] * 6
    assert ahead.adjust(row).tolist() == [0.0, 0.0, 0.0, 0.0, -2.0, -1.0]
    own.append(3)
    assert own.adjust(row).tolist() == [0.0, 0.0, 0.0, -1.0, 0.0, 0.0]
