"""A batch that goes on from the last one is what would have been built anew."""

import random
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from quantpipe.backends.protocol import BatchInput
from quantpipe.engine import batch_builder
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.batch import build_batch
from quantpipe.engine.batch_builder import BatchBuilder
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.step import Step

TENSORS = ("token_ids_T", "positions_T", "slot_mapping_T", "block_table_SB", "logit_rows_R")
OTHERS = ("query_lens", "context_lens", "num_sinks", "window", "dropped_blocks")
CRAMPED = EngineConfig(
    max_num_seqs=5, max_num_batched_tokens=16, block_size=4, num_kv_blocks=24, max_model_len=96, admission="greedy"
)
WINDOWED = EngineConfig(
    max_num_seqs=4, max_num_batched_tokens=16, block_size=4, max_model_len=64, window_tokens=9, sink_tokens=3
)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many batches were built, and how many of them anew; each is compared with one built anew."""
    counts = {"all": 0, "anew": 0}
    build = BatchBuilder.build

    def build_anew(step: Step, window: AttentionWindow) -> BatchInput:
        counts["anew"] += 1
        return build_batch(step, window)

    def build_and_compare(own: BatchBuilder, step: Step) -> BatchInput:
        counts["all"] += 1
        batch, expected = build(own, step), build_batch(step, own._window)
        for name in TENSORS:
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        assert [getattr(batch, name) for name in OTHERS] == [getattr(expected, name) for name in OTHERS]
        return batch

    monkeypatch.setattr(batch_builder, "build_batch", build_anew)
    monkeypatch.setattr(BatchBuilder, "build", build_and_compare)
    yield counts
    assert 0 < counts["anew"] <= counts["all"]


@pytest.mark.parametrize("config", [CRAMPED, WINDOWED], ids=["preemption", "windows and sinks"])
@pytest.mark.parametrize("seed", range(6))
def test_every_batch_is_what_would_be_built_anew(
    compared: dict[str, int], fake_model: SimpleNamespace, config: EngineConfig, seed: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(fake_model.executor(), config)
    running: list[str] = []
    for _ in range(120):
        if rng.random() < 0.15:
            prompt = [rng.randrange(31) for _ in range(rng.randrange(1, 30))]
            params = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0.0, n=rng.choice([1, 1, 3]))
            running.append(engine.add(prompt, params))
        if running and rng.random() < 0.03:
            engine.abort(running.pop(rng.randrange(len(running))))
        engine.step()
    assert compared["all"] > 60


def test_sequences_that_go_on_decoding_are_not_built_anew(
    compared: dict[str, int], fake_model: SimpleNamespace
) -> None:
    engine = Engine(fake_model.executor(), EngineConfig(max_num_seqs=4, block_size=4, max_model_len=64))
    engine.generate([[1, 2, 3], [4, 5], [6]], SamplingParams(max_tokens=30, temperature=0.0))
    assert compared["all"] == 30
    assert compared["anew"] == 2  # the prompts, and the first token behind them


def test_step_that_failed_is_built_anew(
    compared: dict[str, int], fake_model: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = fake_model.executor()
    engine = Engine(executor, EngineConfig(max_num_seqs=4, block_size=4, max_model_len=64))
    engine.add([1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0), "a")
    for _ in range(5):
        engine.step()
    executor.fails = True
    with pytest.raises(RuntimeError):
        engine.step()
    executor.fails = False
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output("a").token_ids == fake_model.dense_greedy([1, 2, 3], 12)
    assert compared["anew"] == 3  # the prompt, the first token behind it, and the step that was taken again


def test_scored_prompt_that_is_read_a_token_at_a_time_is_read_in_order(
    compared: dict[str, int], fake_model: SimpleNamespace
) -> None:
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1, block_size=4, max_model_len=64)
    [output] = Engine(fake_model.executor(), config).generate([[1, 2, 3, 4, 5, 6]], SamplingParams(prompt_logprobs=0))
    assert output.token_ids == fake_model.dense_greedy([1, 2, 3, 4, 5, 6], 16)
