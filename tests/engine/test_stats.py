"""The numbers for a dashboard add up and are defined from the first moment on."""

from types import SimpleNamespace

import pytest

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.stats import EngineCounters, EngineStats

CONFIG = EngineConfig(max_model_len=64, block_size=4, num_kv_blocks=20, max_num_seqs=4, max_num_batched_tokens=16)


def test_fractions_of_nothing_are_defined() -> None:
    stats = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)
    assert (stats.kv_usage_frac, stats.prefix_hit_frac, stats.tokens_per_step, stats.acceptance_frac) == (0, 0, 0, 0)
    assert stats.padding_efficiency_frac == 1


def test_fractions_are_those_of_the_counts() -> None:
    stats = EngineStats(
        0, 0, 5, 15, 20, 0, 0, 0, steps=4, prefix_query_tokens=40, prefix_hit_tokens=10, step_tokens=50,
        context_tokens=30, padded_context_tokens=40, draft_tokens=8, accepted_tokens=6,
    )  # fmt: skip
    assert (stats.kv_usage_frac, stats.prefix_hit_frac, stats.tokens_per_step) == (0.25, 0.25, 12.5)
    assert (stats.padding_efficiency_frac, stats.acceptance_frac) == (0.75, 0.75)


def test_each_step_is_counted_with_its_tokens_and_time() -> None:
    counters = EngineCounters()
    counters.count_step(7, 2, 0.5)
    counters.count_step(3, 0, 0.25)
    assert (counters.steps, counters.step_tokens, counters.step_s, counters.copied_blocks) == (2, 10, 0.75, 2)
    assert (counters.last_step_tokens, counters.last_step_s) == (3, 0.25)


def test_engine_counts_what_it_did(fake_model: SimpleNamespace) -> None:
    engine = Engine(fake_model.executor(), CONFIG)
    engine.generate([[1] * 9, [1] * 9], [SamplingParams(max_tokens=4), SamplingParams(max_tokens=1)])
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (18, 5)
    assert stats.step_tokens + stats.prefix_hit_tokens == 18 + 3
    assert stats.step_s >= stats.last_step_s > 0
    assert (stats.last_step_tokens, stats.used_blocks) == (1, 0)
    assert stats.cached_blocks + stats.free_blocks == stats.total_blocks == 20


@pytest.mark.parametrize("poison", [None, 30])
def test_failures_by_logits_that_are_no_numbers_are_counted(fake_model: SimpleNamespace, poison: int | None) -> None:
    engine = Engine(fake_model.executor(poison=poison), CONFIG)
    engine.generate([[30], [1, 30], [2]], SamplingParams(max_tokens=1))
    # A request whose own parameters leave no token failed too, but the model's logits are not to blame.
    banned = SamplingParams(max_tokens=2, min_tokens=2, stop_token_ids=tuple(range(31)))
    assert engine.generate([[2]], banned)[0].error is not None
    assert engine.stats().nonfinite_failures == (2 if poison is not None else 0)
