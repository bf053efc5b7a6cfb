"""Greedy steps leave the choice to the backend; whatever needs logits does not, and the tokens are the same."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.backends.most_likely import most_likely
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, SamplingParams
from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import sample

CONFIG = EngineConfig(max_num_seqs=4, block_size=4, num_kv_blocks=64, max_model_len=64)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPT = (3, 1, 4, 1, 5)


def count_calls(executor: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of the two ways each step took."""
    calls: list[str] = []
    greedy, plain = executor.forward_greedy, executor.forward  # type: ignore[attr-defined]
    monkeypatch.setattr(executor, "forward_greedy", lambda *given: calls.append("greedy") or greedy(*given))
    monkeypatch.setattr(executor, "forward", lambda *given: calls.append("logits") or plain(*given))
    return calls


def test_greedy_requests_never_ask_for_logits(fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, CONFIG)
    monkeypatch.setattr(executor, "forward", lambda *_: pytest.fail("logits were asked for"))
    monkeypatch.setattr(
        executor, "forward_greedy", lambda batch, kv: most_likely(type(executor).forward(executor, batch, kv))
    )
    [output, forked] = engine.generate([PROMPT, PROMPT], [GREEDY, replace(GREEDY, n=2)])
    expected = fake_model.dense_greedy(PROMPT, 6)
    assert output.token_ids == expected
    assert [own.token_ids for own in forked.samples] == [expected, expected]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0, "seed": 1},
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"logit_bias": {2: 5.0}},
        {"repetition_penalty": 1.5},
        {"min_tokens": 6},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_whatever_needs_logits_gets_them(
    asked: dict[str, object], fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = fake_model.executor()
    calls = count_calls(executor, monkeypatch)
    Engine(executor, CONFIG).generate([PROMPT], replace(GREEDY, **asked))
    assert calls[0] == "logits"


def test_minimum_length_needs_logits_until_it_is_reached(
    fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = fake_model.executor(eos_token_ids=(7,))
    calls = count_calls(executor, monkeypatch)
    Engine(executor, CONFIG).generate([PROMPT], replace(GREEDY, min_tokens=2, ignore_eos=True))
    assert [own for own in calls if own == "greedy"] == ["greedy"] * 4


def test_row_without_a_token_ends_its_sequence_only(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(poison=9), CONFIG)
    healthy, poisoned = engine.generate([PROMPT, (1, 9)], GREEDY)
    assert healthy.token_ids == fake_model.dense_greedy(PROMPT, 6)
    assert poisoned.finish_reason is FinishReason.ABORT
    assert "not finite" in str(poisoned.error)
    assert engine.stats().nonfinite_failures == 1


@given(
    st.lists(st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 2.0, np.inf, np.nan]), min_size=5, max_size=5), max_size=4)
)
def test_most_likely_is_what_the_sampler_chooses(rows: list[list[float]]) -> None:
    logits_RV = np.array(rows, dtype=np.float32).reshape(-1, 5)
    expected = sample(logits_RV, [Sampled(GREEDY)] * len(rows))
    found = most_likely(torch.from_numpy(logits_RV)).tolist()
    assert [None if token_id < 0 else token_id for token_id in found] == expected
