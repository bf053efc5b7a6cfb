"""The bench's arithmetic and order, on a fake engine whose steps take exactly as long as they are told."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.bench.latency import (
    BenchRun,
    RequestTimes,
    num_text_tokens,
    paired_ratio,
    percentile,
    ratios,
    run_bench,
    time_burst,
)
from quantpipe.engine.request import FinishReason, RequestOutput, SamplingParams, StepOutput
from quantpipe.errors import DataError, RecipeError
from quantpipe.gate.judge import Measurement, Verdict, judge, measurement_problem
from quantpipe.gate.limits import Limit
from quantpipe.gate.metrics import is_known_metric
from quantpipe.recipe.schema import BenchSection

TEXT = tuple(range(5000))


@dataclass
class FakeClock:
    """Time that passes only when an engine works."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeEngine:
    """Every running request gets one token per step; its first step (prefill) costs ``prefill_s`` per request more."""

    clock: FakeClock
    name: str = "baseline"
    prefill_s: float = 0.1
    step_s: float = 0.01
    missing_tokens: int = 0
    noise: random.Random | None = None
    journal: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    ids: "count[int]" = field(default_factory=count)

    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> str:
        request_id = f"{self.name}-{next(self.ids)}"
        self.waiting[request_id] = params.max_tokens - self.missing_tokens
        self.params.append(params)
        self.journal.append((self.name, tuple(prompt_ids)))
        return request_id

    def step(self) -> list[StepOutput]:
        took_s = self.step_s + self.prefill_s * len(self.waiting)
        self.clock.now_s += took_s * (1.0 if self.noise is None else math.exp(self.noise.gauss(0.0, 0.05)))
        self.running |= self.waiting
        self.waiting = {}
        outputs = []
        for request_id in list(self.running):
            self.running[request_id] -= 1
            done = self.running[request_id] <= 0
            if done:
                del self.running[request_id]
                self.finished.add(request_id)
            outputs.append(StepOutput(request_id, (7,), (), FinishReason.LENGTH if done else None))
        return outputs

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)

    def take_output(self, request_id: str) -> RequestOutput:
        self.finished.remove(request_id)
        return RequestOutput(request_id, (), (), FinishReason.LENGTH)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)


def a_pair(**candidate: float) -> dict[str, FakeEngine]:
    clock, journal = FakeClock(), []  # type: ignore[var-annotated]
    return {
        "baseline": FakeEngine(clock, "baseline", journal=journal),
        "candidate": FakeEngine(clock, "candidate", journal=journal, **candidate),  # type: ignore[arg-type]
    }


def section(**changes: object) -> BenchSection:
    return BenchSection.model_validate(
        {"concurrency": [1, 4], "prompt_tokens": 8, "new_tokens": 5, "repeats": 3, "seed": 0} | changes
    )


def bench(engines: dict[str, FakeEngine], **changes: object):  # type: ignore[no-untyped-def]
    return run_bench(engines, section(**changes), TEXT, clock=engines["baseline"].clock)


def by_name(measurements: Sequence[Measurement]) -> dict[str, Measurement]:
    return {m.name: m for m in measurements}


def test_absolute_figures_follow_their_definitions() -> None:
    clock = FakeClock()
    requests, wall_s = time_burst("baseline", FakeEngine(clock), [(1, 2)] * 4, 5, clock)
    assert len(requests) == 4
    for request in requests:
        assert request.ttft_s == pytest.approx(0.1 * 4 + 0.01)
        assert request.tpot_s == pytest.approx(0.01)
        assert request.e2e_s == pytest.approx(0.41 + 4 * 0.01)
    run = BenchRun("baseline", 4, 0, 0, requests, wall_s)
    assert run.output_tok_s == pytest.approx(4 * 5 / 0.45)


def test_ratios_are_candidate_over_baseline_at_each_concurrency() -> None:
    result = bench(a_pair(prefill_s=0.05, step_s=0.02))
    found = by_name(result.measurements)
    assert set(found) == {f"{m}_c{c}" for m in ("ttft_ratio", "tpot_ratio", "output_tok_s_ratio") for c in (1, 4)}
    assert found["tpot_ratio_c4"].value == pytest.approx(2.0)
    assert found["ttft_ratio_c1"].value == pytest.approx(0.07 / 0.11)
    assert found["ttft_ratio_c4"].value == pytest.approx(0.22 / 0.41)
    assert found["output_tok_s_ratio_c1"].value == pytest.approx((0.11 + 0.04) / (0.07 + 0.08))
    assert found["output_tok_s_ratio_c4"].value == pytest.approx((0.41 + 0.04) / (0.22 + 0.08))
    assert all(m.num_samples == 3 and is_known_metric(m.name) for m in result.measurements)
    assert all(measurement_problem(m) is None for m in result.measurements)


def test_engines_take_turns_in_alternating_order_on_the_same_prompts_after_one_warm_up_each() -> None:
    engines = a_pair()
    bench(engines, concurrency=[2], repeats=4)
    bursts = [engines["baseline"].journal[i : i + 2] for i in range(0, 20, 2)]
    assert all(first[0] == second[0] for first, second in bursts)
    names = "".join(burst[0][0][0] for burst in bursts)
    assert sorted(names[:2]) == ["b", "c"]
    assert names[2:] == "bccbbccb"
    prompts = [tuple(prompt for _, prompt in burst) for burst in bursts]
    for turn in range(0, 10, 2):
        assert prompts[turn] == prompts[turn + 1]
    assert len(set(prompts)) == 5  # no repeat is served from what an earlier one left behind
    assert all(len(prompt) == 8 for burst in prompts for prompt in burst)


def test_requests_are_greedy_ignore_the_end_token_and_leave_nothing_in_the_engine() -> None:
    engines = a_pair()
    bench(engines)
    for engine in engines.values():
        assert engine.params
        assert all(p.temperature == 0.0 and p.ignore_eos and p.max_tokens == 5 for p in engine.params)
        assert not engine.has_unfinished
        assert not engine.finished


def test_rows_hold_every_repeat_in_the_order_it_ran() -> None:
    runs = bench(a_pair(), concurrency=[2], repeats=3).runs
    assert [(run.engine[0], run.repeat, run.order) for run in runs] == [
        ("b", 0, 0), ("c", 0, 1), ("c", 1, 2), ("b", 1, 3), ("b", 2, 4), ("c", 2, 5),
    ]  # fmt: skip
    assert all(len(run.requests) == run.concurrency == 2 for run in runs)


def test_the_summary_pools_requests_per_engine_and_concurrency() -> None:
    rows = bench(a_pair(step_s=0.02)).summary()
    assert [(row.concurrency, row.engine, row.num_requests) for row in rows] == [
        (1, "baseline", 3), (1, "candidate", 3), (4, "baseline", 12), (4, "candidate", 12),
    ]  # fmt: skip
    assert rows[3].tpot_p50_s == pytest.approx(0.02)
    assert rows[3].ttft_p50_s == pytest.approx(0.42)
    assert rows[0].output_tok_s == pytest.approx(5 / 0.15)


def test_a_steady_drift_of_the_machine_cancels_over_an_even_number_of_repeats() -> None:
    def drifting(order: int, repeat: int, engine: str) -> BenchRun:
        slow = 1.01**order
        times = RequestTimes(0.1 * slow, 0.5 * slow, 5)
        return BenchRun(engine, 1, repeat, order, (times,), 0.5 * slow)

    names = "bccbbccb"
    runs = [drifting(i, i // 2, {"b": "baseline", "c": "candidate"}[name]) for i, name in enumerate(names)]
    assert all(m.value == pytest.approx(1.0) for m in ratios(runs))


def test_the_shortest_text_is_long_enough() -> None:
    engines = a_pair()
    result = run_bench(engines, section(), TEXT[: num_text_tokens(section())], clock=engines["baseline"].clock)
    assert len(result.runs) == 2 * 2 * 3


def test_one_repeat_has_no_interval_and_the_gate_is_unsure() -> None:
    result = bench(a_pair(step_s=0.5), repeats=1)
    slow = by_name(result.measurements)["tpot_ratio_c1"]
    assert (slow.low, slow.high) == (-math.inf, math.inf)
    assert judge({"tpot_ratio_c1": Limit(max=1.1)}, result.measurements).verdict is Verdict.UNSURE


def test_the_same_engine_twice_is_no_regression_and_a_slowed_one_fails() -> None:
    noise = random.Random(0)
    limits = {"output_tok_s_ratio_c4": Limit(min=0.8), "tpot_ratio_c4": Limit(max=1.25)}
    same, slowed = a_pair(), a_pair(step_s=0.02, prefill_s=0.2)
    for engine in (*same.values(), *slowed.values()):
        engine.noise = noise
    assert judge(limits, bench(same, repeats=6).measurements).verdict is Verdict.PASS
    assert judge(limits, bench(slowed, repeats=6).measurements).verdict is Verdict.FAIL


@pytest.mark.parametrize("missing", [1, 4, -1])
def test_an_engine_that_gives_another_number_of_tokens_is_refused(missing: int) -> None:
    engines = a_pair()
    engines["candidate"].missing_tokens = missing
    with pytest.raises(DataError, match=rf"candidate engine gave {5 - missing} tokens where 5 were asked"):
        bench(engines)
    assert not any(engine.has_unfinished for engine in engines.values())


def test_an_error_in_a_step_leaves_no_request_behind() -> None:
    engines = a_pair()

    def broken() -> list[StepOutput]:
        raise ArithmeticError("broken")

    engines["candidate"].step = broken  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError):
        bench(engines)
    assert not engines["candidate"].has_unfinished


def test_a_clock_that_stands_still_is_refused() -> None:
    with pytest.raises(DataError, match="no measurable time"):
        bench(a_pair(step_s=0.0, prefill_s=0.0))


def test_what_cannot_be_benched_is_refused_before_any_work() -> None:
    engines = a_pair()
    with pytest.raises(RecipeError, match="baseline and candidate"):
        run_bench({"baseline": engines["baseline"]}, section(), TEXT)
    engines["candidate"].waiting["other"] = 3
    with pytest.raises(DataError, match="candidate engine is still serving"):
        bench(engines)
    del engines["candidate"].waiting["other"]
    shortest = num_text_tokens(section())
    assert shortest == 8 + (1 + 4) * (1 + 3) - 1
    with pytest.raises(DataError, match="windows of 8 tokens"):
        run_bench(engines, section(), TEXT[: shortest - 1], clock=engines["baseline"].clock)
    assert not engines["baseline"].journal


def test_the_interval_is_the_t_interval_of_the_mean_log_ratio() -> None:
    # three ratios with logs -0.1, 0, 0.1: mean 0, sd 0.1, t(0.95, 2) = 2.919986
    pairs = [(1.0, math.exp(-0.1)), (2.0, 2.0), (4.0, 4.0 * math.exp(0.1))]
    found = paired_ratio("ttft_ratio_c1", pairs)
    half = 2.919986 * 0.1 / math.sqrt(3)
    assert found.value == pytest.approx(1.0)
    assert (found.low, found.high) == (pytest.approx(math.exp(-half)), pytest.approx(math.exp(half)))
    assert (found.confidence, found.num_samples, found.unit) == (0.9, 3, "ratio")
    assert "baseline 2," in found.detail


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    draw = random.Random(5)
    hits = 0
    for _ in range(2000):
        pairs = [(math.exp(draw.gauss(0, 0.1)), 1.2 * math.exp(draw.gauss(0, 0.1))) for _ in range(4)]
        found = paired_ratio("tpot_ratio_c1", pairs)
        hits += found.low <= 1.2 <= found.high
    # 90 % of 2000 = 1800, four standard errors are 54
    assert 1746 <= hits <= 1854


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=6))
def test_a_ratio_is_always_inside_its_interval_and_swapping_engines_inverts_it(
    pairs: list[tuple[float, float]],
) -> None:
    found = paired_ratio("ttft_ratio_c1", pairs)
    swapped = paired_ratio("ttft_ratio_c1", [(c, b) for b, c in pairs])
    assert measurement_problem(found) is None
    assert found.value * swapped.value == pytest.approx(1.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_agree_with_numpys_linear_interpolation(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)
