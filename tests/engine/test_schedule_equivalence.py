"""However requests arrive, are chunked, batched, preempted or aborted, each one's tokens are those it gets alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import FinishReason, SamplingParams

STOP = 3


@dataclass(frozen=True)
class Plan:
    """One request of a schedule; ``abort_after`` steps from its arrival it is aborted if it still runs."""

    arrival: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    is_scored: bool
    salt: str
    abort_after: int | None


plans = st.lists(
    st.builds(
        Plan,
        arrival=st.integers(0, 12),
        prompt_ids=st.one_of(
            st.lists(st.integers(0, 30), min_size=1, max_size=30).map(tuple),
            # A few heads that many prompts share, cut anywhere.
            st.builds(
                lambda head, length, tail: ((head,) * length + tuple(tail)) or (head,),
                st.integers(4, 5),
                st.integers(0, 25),
                st.lists(st.integers(4, 6), max_size=5),
            ),
        ),
        max_tokens=st.integers(0, 18),
        is_scored=st.booleans(),
        salt=st.sampled_from(["", "tenant"]),
        abort_after=st.none() | st.integers(0, 15),
    ),
    min_size=1,
    max_size=8,
)
configs = st.builds(
    lambda block_size, spare_blocks, max_num_seqs, spare_tokens, prefix_cache: EngineConfig(
        max_model_len=48,
        block_size=block_size,
        num_kv_blocks=math.ceil(48 / block_size) + spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare_tokens,
        prefix_cache=prefix_cache,
    ),
    st.integers(1, 7),
    st.integers(0, 6),
    st.integers(1, 5),
    st.integers(0, 20),
    st.booleans(),
)


def collector(rows: list[npt.NDArray[np.float32]]) -> Callable[[int, npt.NDArray[np.float32]], None]:
    def sink(first: int, logits: npt.NDArray[np.float32]) -> None:
        assert first == sum(map(len, rows)), "chunks must follow each other, none twice"
        rows.append(logits.copy())

    return sink


@settings(max_examples=80, deadline=None)
@given(plans, configs)
def test_tokens_equal_those_of_a_dense_loop(
    fake_model: SimpleNamespace, schedule: list[Plan], config: EngineConfig
) -> None:
    executor = fake_model.executor(eos_token_ids=(STOP,))
    engine = Engine(executor, config)
    rows: dict[int, list[npt.NDArray[np.float32]]] = {i: [] for i in range(len(schedule))}
    streamed: dict[str, tuple[int, ...]] = {str(i): () for i in range(len(schedule))}
    aborted: set[int] = set()
    time = 0
    while engine.has_unfinished or any(plan.arrival >= time for plan in schedule):
        for i, plan in enumerate(schedule):
            if plan.arrival == time:
                params = SamplingParams(max_tokens=plan.max_tokens, prompt_logprobs=0 if plan.is_scored else None)
                sink = collector(rows[i]) if plan.is_scored else None
                engine.add(plan.prompt_ids, params, str(i), sink, plan.salt)
            is_running = plan.arrival + (plan.abort_after or 0) == time and str(i) not in engine._outputs
            if plan.abort_after is not None and is_running:
                engine.abort(str(i))
                aborted.add(i)
        for step_output in engine.step():
            streamed[step_output.request_id] += step_output.token_ids
        stats = engine.stats()
        assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == stats.total_blocks
        time += 1
        assert time < 3000

    for i, plan in enumerate(schedule):
        expected = fake_model.dense_greedy(plan.prompt_ids, plan.max_tokens, frozenset([STOP]))
        if i in aborted:
            assert streamed[str(i)] == expected[: len(streamed[str(i)])]
            continue
        output = engine.take_output(str(i))
        assert output.token_ids == streamed[str(i)] == expected
        stopped = bool(expected) and expected[-1] == STOP
        assert output.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert [entry.token_id for entry in output.prompt_logprobs] == list(plan.prompt_ids[1:] * plan.is_scored)
        if plan.is_scored:
            dense = np.stack([fake_model.dense_logits(plan.prompt_ids[:n]) for n in range(1, len(plan.prompt_ids) + 1)])
            np.testing.assert_array_equal(np.concatenate(rows[i]), dense)
    assert engine.stats().used_blocks == 0
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
