"""Schedules for property tests: requests and settings at random, carried out step by step, and what must come of it."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from torch import Tensor

from quantpipe.engine.admission import ADMISSIONS
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.batching import BATCHING_MODES
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.draws import sample_seed
from quantpipe.engine.engine import Engine
from quantpipe.engine.policies import POLICIES
from quantpipe.engine.request import QOS_CLASSES, FinishReason, QosClass, RequestOutput, SamplingParams, StepOutput
from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import sample

# What a model says after some tokens, alone: with no cache, batch or schedule.
DenseLogits = Callable[[Sequence[int]], Tensor]
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

    def check(self, dense_logits: DenseLogits) -> None:
        """Samples and prompt logits are those of the model alone, as far as they were not given up; nothing is held."""
        for i, plan in enumerate(self.schedule):
            params = plan.params(self.engine.config.max_num_seqs)
            all_expected = samples_of(dense_logits, plan.prompt_ids, params, (STOP,))
            if i in self.aborted:
                for index, expected in enumerate(all_expected):
                    assert self.streamed[str(i), index] == expected[: len(self.streamed[str(i), index])]
                continue
            output = self.engine.take_output(str(i))
            self._check_samples(i, output, all_expected)
            self._check_scores(i, output, dense_logits)
        assert self.engine.stats().used_blocks == 0

    def _check_samples(self, i: int, output: RequestOutput, all_expected: list[tuple[int, ...]]) -> None:
        first = output.samples[0]
        assert (output.token_ids, output.finish_reason) == (first.token_ids, first.finish_reason)
        for sampled, expected in zip(output.samples, all_expected, strict=True):
            assert sampled.token_ids == self.streamed[str(i), sampled.index]
            if (str(i), sampled.index) in self.ended:
                assert sampled.finish_reason is FinishReason.ABORT
                assert sampled.token_ids == expected[: len(sampled.token_ids)]
                continue
            assert sampled.token_ids == expected
            stopped = bool(expected) and expected[-1] == STOP
            assert sampled.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _check_scores(self, i: int, output: RequestOutput, dense_logits: DenseLogits) -> None:
        plan = self.schedule[i]
        if plan.scored_from is None:
            assert output.prompt_logprobs == ()
            return
        lengths = range(plan.first_scored, len(plan.prompt_ids) + 1)
        assert [entry.token_id for entry in output.prompt_logprobs] == list(plan.prompt_ids[plan.first_scored :])
        dense = np.stack([dense_logits(plan.prompt_ids[:length]) for length in lengths])
        np.testing.assert_array_equal(np.concatenate(self.rows[i]), dense)


def samples_of(
    dense_logits: DenseLogits, prompt_ids: Sequence[int], params: SamplingParams, eos_token_ids: Iterable[int] = ()
) -> list[tuple[int, ...]]:
    """What a model generates for each of a seeded request's samples, one after the other, each alone."""
    assert params.seed is not None
    samples = []
    for index in range(params.n):
        sampled = Sampled(params, prompt_ids, sample_seed(params.seed, index), eos_token_ids)
        token_ids: list[int] = []
        while len(token_ids) < params.max_tokens:
            [token_id] = sample(dense_logits([*prompt_ids, *token_ids]).numpy()[None], [sampled])
            assert token_id is not None
            token_ids.append(token_id)
            sampled.append(token_id)
            if token_id in params.stop_token_ids or (token_id in eos_token_ids and not params.ignore_eos):
                break
        samples.append(tuple(token_ids))
    return samples
