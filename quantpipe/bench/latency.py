"""Candidate against baseline in one process: time to first token, time per output token, output tokens per second.

Definitions: TTFT = add -> first token. TPOT = (end-to-end - TTFT) / (n - 1) per request. Output tok/s = all new tokens
/ wall time from the first add to the last token. Load is a closed burst: at concurrency c, c requests are added
together and run to their end. The two engines take turns in the order A B B A A B ..., so that a drift of the machine
falls on both alike; ratios are taken within a repeat. Knows engines by what they do, not how.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Protocol

from scipy.special import stdtrit

from quantpipe.bench.workload import text_prompts
from quantpipe.engine.request import RequestOutput, SamplingParams, StepOutput
from quantpipe.errors import DataError, RecipeError
from quantpipe.gate.judge import Measurement
from quantpipe.gate.metrics import metric_of
from quantpipe.gate.report import BenchRow
from quantpipe.recipe.schema import BenchSection
from quantpipe.report import Progress, no_progress

BASELINE, CANDIDATE = "baseline", "candidate"
CONFIDENCE = 0.90  # two-sided: 95 % on the side of a limit

Clock = Callable[[], float]
Prompts = Sequence[Sequence[int]]


class BenchedEngine(Protocol):
    """The part of ``quantpipe.engine.engine.Engine`` that is timed."""

    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> str: ...

    def step(self) -> list[StepOutput]: ...

    def abort(self, request_id: str) -> None: ...

    def take_output(self, request_id: str) -> RequestOutput: ...

    @property
    def has_unfinished(self) -> bool: ...


@dataclass(frozen=True)
class RequestTimes:
    """One request, in seconds since it was added. ``tpot_s`` is over the tokens after the first."""

    ttft_s: float
    e2e_s: float
    num_tokens: int

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.e2e_s - self.ttft_s) / (self.num_tokens - 1)


@dataclass(frozen=True)
class BenchRun:
    """One engine's burst: ``order`` is its place among all timed bursts of this concurrency."""

    engine: str
    concurrency: int
    repeat: int
    order: int
    requests: tuple[RequestTimes, ...]
    wall_s: float

    @property
    def ttft_p50_s(self) -> float:
        """Median time to first token."""
        return percentile([r.ttft_s for r in self.requests], 50)

    @property
    def tpot_p50_s(self) -> float:
        """Median time per output token."""
        return percentile([r.tpot_s for r in self.requests], 50)

    @property
    def output_tok_s(self) -> float:
        """New tokens of all requests per second of wall time."""
        return sum(r.num_tokens for r in self.requests) / self.wall_s


@dataclass(frozen=True)
class BenchResult:
    """Ratios with intervals for the gate, and the runs behind them."""

    measurements: tuple[Measurement, ...]
    runs: tuple[BenchRun, ...]

    def summary(self) -> tuple[BenchRow, ...]:
        """One row per concurrency and engine: percentiles over all its requests, median throughput over repeats."""
        keys = dict.fromkeys((run.concurrency, run.engine) for run in self.runs)
        return tuple(
            _summary_row([run for run in self.runs if (run.concurrency, run.engine) == key]) for key in sorted(keys)
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between order statistics; of one value, that value."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _summary_row(runs: Sequence[BenchRun]) -> BenchRow:
    requests = [request for run in runs for request in run.requests]
    return BenchRow(
        engine=runs[0].engine,
        concurrency=runs[0].concurrency,
        num_requests=len(requests),
        ttft_p50_s=percentile([r.ttft_s for r in requests], 50),
        tpot_p50_s=percentile([r.tpot_s for r in requests], 50),
        output_tok_s=percentile([run.output_tok_s for run in runs], 50),
    )


def num_prompts(section: BenchSection) -> int:
    """How many prompts a bench sends to each engine, the warm-ups included."""
    return sum(section.concurrency) * (section.repeats + 1)


def num_text_tokens(section: BenchSection) -> int:
    """The shortest ``token_source`` that ``run_bench`` can cut its prompts from."""
    return section.prompt_tokens + num_prompts(section) - 1


def run_bench(
    engines: Mapping[str, BenchedEngine],
    section: BenchSection,
    token_source: Sequence[int],
    progress: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> BenchResult:
    """Time ``engines["baseline"]`` and ``engines["candidate"]`` on the same prompts, cut from ``token_source``.

    Per concurrency: one untimed burst each, then ``section.repeats`` pairs in alternating order. Every burst of a
    repeat has its own prompts, the same for both engines. DataError if a request ends with another number of tokens
    than asked, RecipeError if the section cannot be measured.
    """
    _check_bench(engines, section)
    schedule = [(c, repeat) for c in section.concurrency for repeat in range(-1, section.repeats)]
    prompts = text_prompts(token_source, num_prompts(section), section.prompt_tokens, section.seed)
    runs: list[BenchRun] = []
    first = 0
    for concurrency, repeat in progress(schedule, len(schedule), "bench"):
        burst = prompts[first : first + concurrency]
        first += concurrency
        # repeat -1 warms both engines up at this concurrency; its times are dropped
        names = (BASELINE, CANDIDATE) if repeat % 2 == 0 else (CANDIDATE, BASELINE)
        for place, name in enumerate(names):
            requests, wall_s = time_burst(name, engines[name], burst, section.new_tokens, clock)
            if repeat >= 0:
                runs.append(BenchRun(name, concurrency, repeat, 2 * repeat + place, requests, wall_s))
    return BenchResult(tuple(ratios(runs)), tuple(runs))


def _check_bench(engines: Mapping[str, BenchedEngine], section: BenchSection) -> None:
    if set(engines) != {BASELINE, CANDIDATE}:
        raise RecipeError(f"bench: engines are {sorted(engines)}; needed: {BASELINE} and {CANDIDATE}")
    if section.new_tokens < 2:
        raise RecipeError(f"bench.new_tokens: {section.new_tokens}: time per output token needs at least 2")
    if len(set(section.concurrency)) != len(section.concurrency):
        raise RecipeError(f"bench.concurrency: {section.concurrency} repeats a value; name each once")
    for name, engine in engines.items():
        if engine.has_unfinished:
            raise DataError(f"bench: the {name} engine is still serving other requests; bench an idle one")


@dataclass
class _Stamps:
    """When one request was added, had its first token, had its latest one."""

    added_s: float
    first_s: float = math.nan
    last_s: float = math.nan
    num_tokens: int = 0

    def record(self, num_tokens: int, now_s: float) -> None:
        if num_tokens == 0:
            return
        self.first_s = now_s if self.num_tokens == 0 else self.first_s
        self.last_s = now_s
        self.num_tokens += num_tokens

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.first_s - self.added_s, self.last_s - self.added_s, self.num_tokens)


def time_burst(
    name: str, engine: BenchedEngine, prompts: Prompts, new_tokens: int, clock: Clock
) -> tuple[tuple[RequestTimes, ...], float]:
    """Add all prompts, step until each has its tokens; times per request in prompt order, and the wall time."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    stamps: dict[str, _Stamps] = {}
    started_s = clock()
    try:
        for prompt_ids in prompts:
            added_s = clock()
            stamps[engine.add(prompt_ids, params)] = _Stamps(added_s)
        while engine.has_unfinished:
            outputs = engine.step()
            now_s = clock()
            for output in outputs:
                stamps[output.request_id].record(len(output.token_ids), now_s)
        for request_id in stamps:
            engine.take_output(request_id)
    finally:
        for request_id in stamps:
            engine.abort(request_id)  # ends what an error or an interrupt left running; ignored where finished
    return _checked_times(name, list(stamps.values()), new_tokens, started_s)


def _checked_times(
    name: str, stamps: Sequence[_Stamps], new_tokens: int, started_s: float
) -> tuple[tuple[RequestTimes, ...], float]:
    for stamp in stamps:
        if stamp.num_tokens != new_tokens:
            raise DataError(
                f"bench: the {name} engine gave {stamp.num_tokens} tokens where {new_tokens} were asked; not comparable"
            )
    times = tuple(stamp.times for stamp in stamps)
    if any(t.ttft_s <= 0 or t.tpot_s <= 0 for t in times):
        raise DataError(f"bench: the {name} engine took no measurable time; raise bench.new_tokens")
    return times, max(stamp.last_s for stamp in stamps) - started_s


def paired_figures(runs: Sequence[BenchRun]) -> dict[str, tuple[tuple[float, float], ...]]:
    """(baseline, candidate) of each figure at each concurrency, one pair for each repeat."""
    found: dict[str, tuple[tuple[float, float], ...]] = {}
    for concurrency in dict.fromkeys(run.concurrency for run in runs):
        at = [run for run in runs if run.concurrency == concurrency]
        baseline = sorted((run for run in at if run.engine == BASELINE), key=lambda run: run.repeat)
        candidate = sorted((run for run in at if run.engine == CANDIDATE), key=lambda run: run.repeat)
        pairs = list(zip(baseline, candidate, strict=True))
        figures = {
            "ttft_ratio": [(b.ttft_p50_s, c.ttft_p50_s) for b, c in pairs],
            "tpot_ratio": [(b.tpot_p50_s, c.tpot_p50_s) for b, c in pairs],
            "output_tok_s_ratio": [(b.output_tok_s, c.output_tok_s) for b, c in pairs],
        }
        found |= {f"{metric}_c{concurrency}": tuple(values) for metric, values in figures.items()}
    return found


def ratios(runs: Sequence[BenchRun]) -> list[Measurement]:
    """Candidate / baseline of each figure at each concurrency, paired within repeats."""
    return [paired_ratio(name, pairs) for name, pairs in paired_figures(runs).items()]


def paired_ratio(name: str, pairs: Sequence[tuple[float, float]], confidence: float = CONFIDENCE) -> Measurement:
    """Geometric mean of candidate / baseline over repeats, with the t interval of the mean log ratio.

    One repeat has no spread, so no interval: ``[-inf, inf]``, which no limit can pass or fail.
    """
    logs = [math.log(candidate / baseline) for baseline, candidate in pairs]
    mean = fmean(logs)
    low, high = -math.inf, math.inf
    if len(logs) > 1:
        half = float(stdtrit(len(logs) - 1, (1 + confidence) / 2)) * stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(mean - half), _exp(mean + half)
    medians = [percentile(column, 50) for column in zip(*pairs, strict=True)]
    detail = f"baseline {medians[0]:.4g}, candidate {medians[1]:.4g} (medians over repeats)"
    metric = metric_of(name)
    unit = metric.unit if metric is not None else "ratio"
    return Measurement(name, math.exp(mean), low, high, confidence, len(logs), unit, detail)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
