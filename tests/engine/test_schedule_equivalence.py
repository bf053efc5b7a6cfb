"""However requests arrive, are ordered, chunked, batched, forked, guessed, preempted or aborted, each one's tokens are
those it gets alone.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.engine.admission import ADMISSIONS
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.batching import BATCHING_MODES
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.policies import POLICIES
from quantpipe.engine.request import QOS_CLASSES, FinishReason, QosClass, SamplingParams, StepOutput

STOP = 3


@dataclass(frozen=True)
class Plan:
    """One request of a schedule; ``abort_after`` steps from its arrival it is aborted if it still runs.

    ``end_sample`` (index, length) gives up one of its samples once it is so long.
    """

    arrival: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    scored_from: int | None
    salt: str
    abort_after: int | None
    n: int
    temperature: float
    end_sample: tuple[int, int] | None
    priority: int
    qos: QosClass
    deadline_s: float | None

    def params(self, max_num_seqs: int) -> SamplingParams:
        return SamplingParams(
            n=min(self.n, max_num_seqs) if self.max_tokens else 1,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=len(self.prompt_ids),
            prompt_logprobs=None if self.scored_from is None else 0,
            prompt_logprobs_from=self.first_scored,
        )

    @property
    def first_scored(self) -> int:
        return min(self.scored_from or 1, len(self.prompt_ids))


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
        scored_from=st.none() | st.just(1) | st.integers(1, 30),
        salt=st.sampled_from(["", "tenant"]),
        abort_after=st.none() | st.integers(0, 15),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        temperature=st.sampled_from([0.0, 3.0]),
        end_sample=st.none() | st.tuples(st.integers(0, 4), st.integers(1, 6)),
        priority=st.integers(-20, 19),
        qos=st.sampled_from(QOS_CLASSES),
        deadline_s=st.none() | st.sampled_from([1e-6, 0.1, 60.0]),
    ),
    min_size=1,
    max_size=8,
)


def make_config(
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    spare_tokens: int,
    form: tuple[int, int] | None,
    max_prefill_chunk: int | None,
    **others: Any,
) -> EngineConfig:
    """With a pool for one sequence and little more. ``form``: sinks, and by how much a window exceeds a block."""
    most_tokens = max_num_seqs + spare_tokens
    num_blocks, num_sinks, window = math.ceil(48 / block_size), 0, None
    if form is not None:
        num_sinks, window = form[0], block_size + form[1]
        chunk = min(most_tokens, max_prefill_chunk or most_tokens)
        num_blocks = AttentionWindow(block_size, num_sinks, window, window, max_chunk=chunk).most_blocks(None)
    return EngineConfig(
        max_model_len=48,
        block_size=block_size,
        num_kv_blocks=num_blocks + spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=most_tokens,
        max_prefill_chunk=max_prefill_chunk,
        sink_tokens=num_sinks,
        window_tokens=window,
        **others,
    )


configs = st.builds(
    make_config,
    block_size=st.integers(1, 7),
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.integers(1, 5),
    spare_tokens=st.integers(0, 20),
    form=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(list(POLICIES)),
    batching=st.sampled_from(BATCHING_MODES),
    static_wait_s=st.sampled_from([0.0, 0.001]),
    admission=st.sampled_from(["greedy", *ADMISSIONS]),
    max_prefill_chunk=st.none() | st.integers(1, 9),
    max_long_prefills=st.none() | st.integers(1, 2),
    long_prompt_tokens=st.integers(5, 25),
    target_step_s=st.none() | st.sampled_from([1e-6, 0.001]),
    speculative=st.sampled_from(["none", "ngram"]),
    num_draft_tokens=st.integers(1, 9),
)


def collector(rows: list[npt.NDArray[np.float32]], begin: int) -> Callable[[int, npt.NDArray[np.float32]], None]:
    def sink(first: int, logits: npt.NDArray[np.float32]) -> None:
        assert first == begin + sum(map(len, rows)), "chunks must follow each other, none twice"
        rows.append(logits.copy())

    return sink


class Run:
    """A schedule carried out step by step, with what came out of it."""

    def __init__(self, engine: Engine, schedule: list[Plan]) -> None:
        self.engine = engine
        self.schedule = schedule
        self.rows: dict[int, list[npt.NDArray[np.float32]]] = {i: [] for i in range(len(schedule))}
        self.streamed: dict[tuple[str, int], tuple[int, ...]] = defaultdict(tuple)
        self.aborted: set[int] = set()
        self.ended: set[tuple[str, int]] = set()

    def to_the_end(self) -> None:
        time = 0
        while self.engine.has_unfinished or any(plan.arrival >= time for plan in self.schedule):
            for i, plan in enumerate(self.schedule):
                self._act(i, plan, time)
            for output in self.engine.step():
                self._take(output)
            stats = self.engine.stats()
            assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == stats.total_blocks
            time += 1
            assert time < 3000

    def _act(self, i: int, plan: Plan, time: int) -> None:
        if plan.arrival == time:
            sink = None if plan.scored_from is None else collector(self.rows[i], plan.first_scored - 1)
            params = plan.params(self.engine.config.max_num_seqs)
            order = plan.priority, plan.qos, plan.deadline_s
            self.engine.add(plan.prompt_ids, params, str(i), sink, plan.salt, *order)
        is_running = plan.arrival + (plan.abort_after or 0) == time and str(i) not in self.engine._outputs
        if plan.abort_after is not None and is_running:
            self.engine.abort(str(i))
            self.aborted.add(i)

    def _take(self, output: StepOutput) -> None:
        sample = output.request_id, output.index
        assert sample not in self.ended
        self.streamed[sample] += output.token_ids
        end_sample = self.schedule[int(output.request_id)].end_sample
        if output.finish_reason is None and end_sample == (output.index, len(self.streamed[sample])):
            self.engine.abort_sample(*sample)
            self.ended.add(sample)


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
    engine = Engine(executor, config, drafter=drafter)
    run = Run(engine, schedule)
    run.to_the_end()
    for i, plan in enumerate(schedule):
        all_expected = fake_model.dense_samples(plan.prompt_ids, plan.params(config.max_num_seqs), (STOP,), form)
        if i in run.aborted:
            for index, expected in enumerate(all_expected):
                assert run.streamed[str(i), index] == expected[: len(run.streamed[str(i), index])]
            continue
        output = engine.take_output(str(i))
        assert (output.token_ids, output.finish_reason) == (
            output.samples[0].token_ids,
            output.samples[0].finish_reason,
        )
        for sample, expected in zip(output.samples, all_expected, strict=True):
            assert sample.token_ids == run.streamed[str(i), sample.index]
            if (str(i), sample.index) in run.ended:
                assert sample.finish_reason is FinishReason.ABORT
                assert sample.token_ids == expected[: len(sample.token_ids)]
                continue
            assert sample.token_ids == expected
            stopped = bool(expected) and expected[-1] == STOP
            assert sample.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        if plan.scored_from is None:
            assert output.prompt_logprobs == ()
            continue
        lengths = range(plan.first_scored, len(plan.prompt_ids) + 1)
        assert [entry.token_id for entry in output.prompt_logprobs] == list(plan.prompt_ids[plan.first_scored :])
        dense = np.stack([fake_model.dense_logits(plan.prompt_ids[:length], form) for length in lengths])
        np.testing.assert_array_equal(np.concatenate(run.rows[i]), dense)
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
