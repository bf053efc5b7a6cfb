"""A warm-up takes the largest steps and leaves the engine as it was."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.errors import QuantpipeError

CONFIG = EngineConfig(max_model_len=64, block_size=4, num_kv_blocks=40, max_num_seqs=4, max_num_batched_tokens=16)


def test_chunk_and_decode_are_as_large_as_they_will_get(fake_model: SimpleNamespace) -> None:
    executor = fake_model.executor()
    Engine(executor, CONFIG).warm_up()
    assert executor.batch_sizes == [16, 4, 4]  # a whole chunk; its decode and the other prompts; all decode


def test_nothing_of_it_is_left(fake_model: SimpleNamespace) -> None:
    fresh, warm = Engine(fake_model.executor(), CONFIG), Engine(fake_model.executor(), CONFIG)
    warm.warm_up()
    assert warm.stats() == fresh.stats()
    for engine in (fresh, warm):
        [output] = engine.generate([[0] * 30], SamplingParams(max_tokens=9))
        assert output.token_ids == fake_model.dense_greedy([0] * 30, 9)
    assert warm.stats() == fresh.stats()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 2},
        {"sink_tokens": 3, "window_tokens": 8, "num_kv_blocks": 8},
        {"max_model_len": 8, "num_kv_blocks": 2},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 500},
        {"prefix_cache": False},
        {"max_prefill_chunk": 3},
        {"batching": "static", "static_wait_s": 0.0},
        {"batching": "dynamic"},
        {"admission": "reserve"},
    ],
)
def test_every_engine_can_be_warmed_up(fake_model: SimpleNamespace, changes: dict[str, Any]) -> None:
    engine = Engine(fake_model.executor(), dataclasses.replace(CONFIG, **changes))
    engine.warm_up()
    stats = engine.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.steps) == (0, 0, 0)
    params = SamplingParams(max_tokens=1)
    assert engine.generate([[1]], params)[0].token_ids == fake_model.dense_greedy([1], 1)


def test_engine_with_requests_is_not_warmed_up(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    engine.add([1], SamplingParams(max_tokens=1), "a")
    with pytest.raises(QuantpipeError, match="idle"):
        engine.warm_up()
    engine.step()
    with pytest.raises(QuantpipeError, match="idle"):
        engine.warm_up()
    assert len(engine.take_output("a").token_ids) == 1
