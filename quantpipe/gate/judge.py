"""Whether a candidate may be released: limits against measurements that carry their uncertainty.

Three-valued and fail closed. Knows numbers and names only; not how anything was measured, nor how it is shown.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantpipe.errors import EXIT_GATE_FAILED, EXIT_PASS, EXIT_UNSURE, RecipeError
from quantpipe.gate.slice_names import split_name
from quantpipe.wording import count_of

MIN_CONFIDENCE = 0.90  # two-sided, i.e. 95 % on the side of the limit
EXACT_CONFIDENCE = 0.99  # of a count, which has no sampling error; some confidence below 1 is asked for
MAX_USEFUL_SAMPLES = 10**7  # above this, "how many samples would decide" is no longer advice


@dataclass(frozen=True)
class Measurement:
    """One figure with its two-sided interval ``[low, high]`` at ``confidence``, from ``num_samples`` samples.

    An interval that could not be computed (one repeat, say) is ``[-inf, inf]``: it decides nothing.
    """

    name: str
    value: float
    low: float
    high: float
    confidence: float
    num_samples: int
    unit: str
    detail: str = ""


@dataclass(frozen=True)
class Metric:
    """What a figure means: its unit, which direction is better, what it is counted in, and the fewest that count.

    ``per_concurrency`` metrics are measured at each concurrency c and named ``<metric>_c<c>``.
    """

    unit: str
    better: Literal["lower", "higher"]
    text: str
    samples: str
    min_samples: int
    per_concurrency: bool = False


METRICS: dict[str, Metric] = {
    "perplexity_ratio": Metric("ratio", "lower", "candidate perplexity / baseline perplexity", "windows", 5),
    "mean_kl": Metric(
        "nats", "lower", "mean KL divergence of next-token distributions from the baseline", "windows", 5
    ),
    "p99_kl": Metric(
        "nats", "lower", "99th percentile of that divergence over the positions of the text", "windows", 5
    ),
    "worst_domain_kl": Metric(
        "nats", "lower", "`mean_kl` of the domain where it is largest: a limit that each domain must hold", "windows", 5
    ),
    "mean_kl_topk": Metric("nats", "lower", "`mean_kl` with `reference: stored`, a lower bound of it", "windows", 5),
    "p99_kl_topk": Metric("nats", "lower", "`p99_kl` with `reference: stored`, a lower bound of it", "windows", 5),
    "worst_domain_kl_topk": Metric(
        "nats", "lower", "`worst_domain_kl` with `reference: stored`, a lower bound of it", "windows", 5
    ),
    "top1_agreement": Metric("fraction", "higher", "positions where both rank the same token first", "windows", 5),
    "accuracy_loss_points": Metric("points", "lower", "points lost on the same items (100 x fraction)", "items", 20),
    "manifest_mismatches": Metric(
        "count", "lower", "tensors and files that differ from the artifact's manifest; always checked", "tensors", 1
    ),
    "prompt_mismatches": Metric(
        "count",
        "lower",
        "texts and conversations that the artifact's tokenizer and chat template make other tokens of than the base "
        "model's; always checked",
        "texts",
        1,
    ),
    "ttft_ratio": Metric("ratio", "lower", "time to first token, candidate / baseline", "repeats", 1, True),
    "tpot_ratio": Metric("ratio", "lower", "time per output token, candidate / baseline", "repeats", 1, True),
    "output_tok_s_ratio": Metric(
        "ratio", "higher", "output tokens per second, candidate / baseline", "repeats", 1, True
    ),
}


SLICED_SAMPLES = ("windows", "items")


def concurrency_of(name: str) -> int | None:
    """The c of a ``<metric>_c<c>`` name; None for a name without it."""
    match = re.fullmatch(r".+_c([1-9][0-9]*)", name)
    return int(match.group(1)) if match else None


def metric_of(name: str) -> Metric | None:
    """The metric a name stands for (``ttft_ratio_c8`` is ``ttft_ratio`` at concurrency 8, ``mean_kl[domain=legal]`` is
    ``mean_kl`` on that domain); None if it is unknown."""
    plain, fields = split_name(name) or ("", {})
    if fields:
        metric = METRICS.get(plain)
        return metric if metric is not None and metric.samples in SLICED_SAMPLES else None
    concurrency = concurrency_of(name)
    metric = METRICS.get(name if concurrency is None else name.removesuffix(f"_c{concurrency}"))
    return metric if metric is not None and metric.per_concurrency == (concurrency is not None) else None


def is_known_metric(name: str) -> bool:
    """Whether a limit may be set on this name."""
    return metric_of(name) is not None


def known_metric_names(concurrencies: Sequence[int] = (1, 8)) -> list[str]:
    """Every name a limit may be set on, the per-concurrency ones spelled out for these concurrencies."""
    plain = [name for name, metric in METRICS.items() if not metric.per_concurrency]
    return plain + [f"{name}_c{c}" for name, metric in METRICS.items() if metric.per_concurrency for c in concurrencies]


class Verdict(StrEnum):
    """PASS, FAIL, or UNSURE: the samples do not decide."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSURE = "UNSURE"

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        return {Verdict.PASS: EXIT_PASS, Verdict.FAIL: EXIT_GATE_FAILED, Verdict.UNSURE: EXIT_UNSURE}[self]


FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


class Limit(BaseModel):
    """The worst value still accepted: ``max`` or ``min``, exactly one. A value equal to the limit is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    max: FiniteFloat | None = None
    min: FiniteFloat | None = None

    @model_validator(mode="after")
    def _has_exactly_one_bound(self) -> "Limit":
        if (self.max is None) == (self.min is None):
            raise ValueError("a limit has exactly one of max and min")
        return self

    @property
    def bound(self) -> float:
        """The number itself, whichever side it bounds."""
        bound = self.max if self.max is not None else self.min
        assert bound is not None  # the validator has seen to it
        return bound

    def __str__(self) -> str:
        return f"{'<=' if self.max is not None else '>='} {self.bound:g}"


def limit_problem(name: str, limit: Limit) -> str | None:
    """Why this limit cannot be judged (unknown metric, or it bounds the harmless side); None if it can."""
    metric = metric_of(name)
    if metric is None:
        return "unknown metric"
    if (metric.better == "lower") != (limit.max is not None):
        wanted = "max" if metric.better == "lower" else "min"
        return f"{metric.better} is better, so the limit must be a {wanted}"
    return None


@dataclass(frozen=True)
class Check:
    """One limit and what became of it. ``measurement`` is None where the metric was not measured at all."""

    metric: str
    limit: Limit
    measurement: Measurement | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class GateResult:
    """The verdict, the checks it rests on in the order of the limits, and what was measured without a limit."""

    verdict: Verdict
    checks: tuple[Check, ...]
    informational: tuple[Measurement, ...] = ()


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of several: any FAIL is FAIL, else any UNSURE is UNSURE; nothing checked never passes."""
    if Verdict.FAIL in verdicts or not verdicts:
        return Verdict.FAIL
    return Verdict.UNSURE if Verdict.UNSURE in verdicts else Verdict.PASS


def judge(
    limits: Mapping[str, Limit],
    measurements: Sequence[Measurement],
    expected_samples: Mapping[str, int] | None = None,
) -> GateResult:
    """Judge every limit on its own interval.

    PASS only where the whole interval is inside the limit, FAIL where all of it is outside, UNSURE where it straddles.
    Anything that stops a limit from being judged (metric missing or measured twice, not a number, fewer samples than
    the metric's minimum or than ``expected_samples`` declares for it, a broken interval) is FAIL with the reason.
    RecipeError without any limit.
    """
    if not limits:
        raise RecipeError("gate: no limits; a gate without limits would release anything, so set at least one")
    expected = expected_samples or {}
    checks = tuple(
        _check(name, limit, [m for m in measurements if m.name == name], expected.get(name, 0))
        for name, limit in limits.items()
    )
    informational = tuple(m for m in measurements if m.name not in limits)
    return GateResult(overall([check.verdict for check in checks]), checks, informational)


def _check(name: str, limit: Limit, found: Sequence[Measurement], num_expected: int) -> Check:
    problem = limit_problem(name, limit)
    if problem is None and len(found) != 1:
        problem = "not measured" if not found else f"measured {len(found)} times; one figure is needed"
    if problem is None:
        problem = measurement_problem(found[0], num_expected)
    if problem is not None:
        return Check(name, limit, found[0] if found else None, Verdict.FAIL, f"cannot be judged: {problem}")
    verdict = _verdict_of(limit, found[0])
    return Check(name, limit, found[0], verdict, _reason(verdict, limit, found[0]))


def measurement_problem(measurement: Measurement, num_expected: int = 0) -> str | None:
    """Why this measurement of a known metric decides nothing; None if it is sound. Open intervals are sound."""
    metric = metric_of(measurement.name)
    if metric is None:
        return "unknown metric"
    value, low, high = measurement.value, measurement.low, measurement.high
    num_needed = max(metric.min_samples, num_expected)
    if measurement.unit != metric.unit:
        return f"measured in '{measurement.unit}', the limit is in '{metric.unit}'"
    if not math.isfinite(value):
        return f"the value is {value}"
    if math.isnan(low) or math.isnan(high):
        return "the interval is not a number"
    if low > high:
        return f"the interval is inverted: [{low:g}, {high:g}]"
    slack = 1e-9 * (1 + abs(value))  # an end may miss the value by rounding only
    if not low - slack <= value <= high + slack:
        return f"the interval [{low:g}, {high:g}] does not contain the value {value:g}"
    if not MIN_CONFIDENCE - 1e-9 <= measurement.confidence < 1:
        return f"the interval's confidence is {measurement.confidence:g}; at least {MIN_CONFIDENCE:g} is needed"
    if measurement.num_samples < num_needed:
        return f"only {count_of(measurement.num_samples, metric.samples)}; at least {num_needed:,} are needed"
    return None


def _verdict_of(limit: Limit, measurement: Measurement) -> Verdict:
    low, high = min(measurement.low, measurement.value), max(measurement.high, measurement.value)
    if limit.max is not None:
        inside, outside = high <= limit.bound, low > limit.bound
    else:
        inside, outside = low >= limit.bound, high < limit.bound
    return Verdict.PASS if inside else Verdict.FAIL if outside else Verdict.UNSURE


def _reason(verdict: Verdict, limit: Limit, measurement: Measurement) -> str:
    if verdict is not Verdict.UNSURE:
        return f"the whole interval is {'inside' if verdict is Verdict.PASS else 'outside'} the limit"
    metric = metric_of(measurement.name)
    samples = metric.samples if metric is not None else "samples"
    if math.isinf(measurement.low) and math.isinf(measurement.high):
        return f"no interval could be computed from {count_of(measurement.num_samples, samples)}; more are needed"
    num_needed = samples_to_decide(limit, measurement)
    if num_needed is None:
        return "the limit is inside the interval, too close to the value for more samples to decide"
    return f"the limit is inside the interval; roughly {num_needed:,} {samples} would decide"


def samples_to_decide(limit: Limit, measurement: Measurement) -> int | None:
    """About how many samples bring the interval to one side of the limit, its width falling as 1 / sqrt(n).

    It supposes that the value stays where it is. None where that has no answer: no interval, or the value (almost)
    on the limit.
    """
    distance = abs(limit.bound - measurement.value)
    limit_is_above = limit.bound > measurement.value
    width = measurement.high - measurement.value if limit_is_above else measurement.value - measurement.low
    if distance == 0 or not math.isfinite(width):
        return None
    factor = width / distance
    if factor > MAX_USEFUL_SAMPLES:
        return None
    num_needed = max(math.ceil(measurement.num_samples * factor**2), measurement.num_samples + 1)
    return num_needed if num_needed <= MAX_USEFUL_SAMPLES else None
