"""However requests arrive, are ordered, chunked, batched, forked, guessed, preempted or aborted, each one's tokens are
those it gets alone.
"""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from tests.engine.schedules import STOP, Plan, Run, configs, plans


@settings(max_examples=60, deadline=None)
@given(plans, configs, st.none() | st.sampled_from([0.0, 0.3, 1.0]), st.none() | st.integers(2, 12))
def test_tokens_equal_those_of_a_dense_loop(
    fake_model: SimpleNamespace,
    schedule: list[Plan],
    config: EngineConfig,
    wrong_frac: float | None,
    own_window: int | None,
) -> None:
    if config.window_tokens is None and own_window is not None:
        config = dataclasses.replace(config, num_kv_blocks=(config.num_kv_blocks or 0) + 10)  # a window and a chunk
    executor = fake_model.executor(eos_token_ids=(STOP,), window=own_window)
    windows = [window for window in (own_window, config.window_tokens) if window is not None]
    form = config.sink_tokens, min(windows, default=None)
    drafter = None if wrong_frac is None else fake_model.oracle(wrong_frac, form)
    run = Run(Engine(executor, config, drafter=drafter), schedule)
    run.to_the_end()
    run.check(partial(fake_model.dense_logits, form=form))
    assert max(executor.batch_sizes, default=0) <= config.max_num_batched_tokens


@pytest.mark.parametrize("max_num_seqs", [1, 6])
def test_small_pool_with_preemption_gives_the_tokens_of_a_large_one(
    fake_model: SimpleNamespace, max_num_seqs: int
) -> None:
    common = tuple(range(4))
    prompts = [(*common, i) for i in range(6)]

    def run(num_kv_blocks: int) -> tuple[list[tuple[int, ...]], int]:
        config = EngineConfig(
            max_model_len=32,
            block_size=4,
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8,
            admission="greedy",
        )
        engine = Engine(fake_model.executor(), config)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=25))
        return [output.token_ids for output in outputs], engine.stats().num_preemptions

    tokens, num_preemptions = run(8)
    plentiful, none = run(100)
    assert tokens == plentiful == [fake_model.dense_greedy(prompt, 25) for prompt in prompts]
    assert none == 0
    assert (num_preemptions > 0) == (max_num_seqs > 1)


@pytest.mark.parametrize("length", [4, 8, 12])
def test_prompt_of_whole_blocks_sent_twice_works(fake_model: SimpleNamespace, length: int) -> None:
    engine = Engine(fake_model.executor(), EngineConfig(max_model_len=16, block_size=4))
    prompt = tuple(range(length))
    first, second = engine.generate([prompt, prompt], SamplingParams(max_tokens=3))
    assert first.token_ids == second.token_ids == fake_model.dense_greedy(prompt, 3)
