"""Which decode steps an engine lets its backend record."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from quantpipe.backends.protocol import DecodeLimits
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine

CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=16, block_size=4, max_model_len=30)


def limits_of(fake_model: SimpleNamespace, config: EngineConfig) -> list[DecodeLimits]:
    executor, recorded = fake_model.executor(), list[DecodeLimits]()

    def record(kv_cache: Any, limits: DecodeLimits) -> None:
        assert kv_cache.num_blocks > 0
        recorded.append(limits)

    executor.record_decodes = record
    Engine(executor, config)
    return recorded


def test_every_decode_that_may_come_is_within_the_limits(fake_model: SimpleNamespace) -> None:
    assert limits_of(fake_model, CONFIG) == [DecodeLimits(max_num_seqs=3, max_blocks=8)]


def test_tables_of_endless_texts_are_as_long_as_a_window_asks(fake_model: SimpleNamespace) -> None:
    config = dataclasses.replace(CONFIG, window_tokens=8, sink_tokens=2)
    [limits] = limits_of(fake_model, config)
    assert (limits.num_sinks, limits.window) == (2, 8)
    # One sink block; a window and a chunk of 16 tokens, wherever they begin within a block.
    assert limits.max_blocks == 1 + 7


@pytest.mark.parametrize("window_tokens", [None, 8])
def test_nothing_is_recorded_where_that_is_off(fake_model: SimpleNamespace, window_tokens: int | None) -> None:
    config = dataclasses.replace(CONFIG, cuda_graphs=False, window_tokens=window_tokens)
    assert limits_of(fake_model, config) == []
