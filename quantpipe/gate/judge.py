"""Whether a candidate may be released: limits against measurements that carry their uncertainty.

Three-valued and fail closed. Knows numbers and names only; not how anything was measured, nor how it is shown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from typing import Literal

from quantpipe.errors import EXIT_GATE_FAILED, EXIT_PASS, EXIT_UNSURE, RecipeError
from quantpipe.gate.limits import GateLimit, Limit, limit_problem
from quantpipe.gate.metrics import metric_of
from quantpipe.wording import count_of

MIN_CONFIDENCE = 0.90  # two-sided, i.e. 95 % on the side of the limit
MAX_USEFUL_SAMPLES = 10**7  # above this, "how many samples would decide" is no longer advice
Correction = Literal["none", "holm"]


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


# The figure that a limit is about, at a confidence; or why there is none.
Measure = Callable[[GateLimit, float], Measurement | str]


class Verdict(StrEnum):
    """PASS, FAIL, or UNSURE: the samples do not decide."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSURE = "UNSURE"

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        return {Verdict.PASS: EXIT_PASS, Verdict.FAIL: EXIT_GATE_FAILED, Verdict.UNSURE: EXIT_UNSURE}[self]


@dataclass(frozen=True)
class Check:
    """One limit and what became of it. ``measurement`` is None where the metric was not measured at all.

    ``is_waived``: the limit is missed, and a waiver that counted on the day of the verdict lets it be.
    """

    entry: GateLimit
    measurement: Measurement | None
    verdict: Verdict
    reason: str
    is_waived: bool = False

    @property
    def metric(self) -> str:
        """The name of the figure that was judged."""
        return self.entry.figure

    @property
    def limit(self) -> Limit:
        """The bound on it."""
        return self.entry.limit

    @property
    def is_warning(self) -> bool:
        """Undecided, and only to warn."""
        return self.verdict is Verdict.UNSURE and self.entry.on_unsure == "warn" and not self.is_waived

    @property
    def counted(self) -> Verdict:
        """What it counts as in the verdict on the whole."""
        return Verdict.PASS if self.is_waived or self.is_warning else self.verdict

    @property
    def outcome(self) -> str:
        """The verdict as it is shown."""
        return f"{self.verdict} (waived)" if self.is_waived else f"{self.verdict}{' (warns)' * self.is_warning}"


@dataclass(frozen=True)
class GateResult:
    """The verdict, the checks it rests on in the order of the limits, and what was measured without a limit."""

    verdict: Verdict
    checks: tuple[Check, ...]
    informational: tuple[Measurement, ...] = ()
    correction: Correction = "none"

    @property
    def title(self) -> str:
        """The verdict in words: ``PASS with waivers`` is no plain PASS."""
        if self.verdict is not Verdict.PASS:
            return str(self.verdict)
        qualified = [
            *(["waivers"] if any(check.is_waived for check in self.checks) else []),
            *(["warnings"] if any(check.is_warning for check in self.checks) else []),
        ]
        return " ".join([str(self.verdict), *(["with"] if qualified else []), " and ".join(qualified)]).strip()


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
    """Judge plain limits on figures that were measured already, each on its own interval (``judge_limits``)."""

    def found(entry: GateLimit, _confidence: float) -> Measurement | str:
        named = [m for m in measurements if m.name == entry.figure]
        if len(named) == 1:
            return named[0]
        return f"measured {len(named)} times; one figure is needed" if named else "not measured"

    entries = [GateLimit.of(name, limit) for name, limit in limits.items()]
    return judge_limits(entries, found, expected_samples, [m for m in measurements if m.name not in limits])


def judge_limits(
    limits: Sequence[GateLimit],
    measure: Measure,
    expected_samples: Mapping[str, int] | None = None,
    informational: Sequence[Measurement] = (),
    correction: Correction = "none",
    today: date | None = None,
) -> GateResult:
    """Judge every limit on the interval that ``measure`` gives for it.

    PASS only where the whole interval is inside the limit, FAIL where all of it is outside, UNSURE where it straddles.
    Anything that stops a limit from being judged (not measured, not a number, fewer samples than the metric's minimum,
    than ``min_items`` of the limit, or than ``expected_samples`` declares for a figure of all samples, a broken
    interval) is FAIL with the reason, and no waiver covers it. RecipeError without any limit.

    ``correction``: ``none`` judges each on its own. ``holm`` widens the intervals (Holm, Scandinavian Journal of
    Statistics 6, 1979): any PASS or FAIL among all the checks is wrong with at most the chance that one check has.
    Waivers count until their day, which is compared with ``today`` (in UTC).
    """
    if not limits:
        raise RecipeError("gate: no limits; a gate without limits would release anything, so set at least one")
    day, expected = today or datetime.now(UTC).date(), expected_samples or {}
    first = [_check(entry, measure(entry, MIN_CONFIDENCE), expected) for entry in limits]
    sound = [number for number, (check, is_sound) in enumerate(first) if is_sound and _is_sampled(check)]
    checks = {number: check for number, (check, _) in enumerate(first)}
    if correction == "holm":
        checks |= _by_holm(limits, measure, expected, sound)
    judged = {number for number, (_, is_sound) in enumerate(first) if is_sound}
    final = tuple(
        _with_waiver(check, day) if number in judged else _without_waiver(check) for number, check in checks.items()
    )
    return GateResult(overall([check.counted for check in final]), final, tuple(informational), correction)


def _is_sampled(check: Check) -> bool:
    """Whether chance has a part in the figure: a count of differing files has none."""
    metric = metric_of(check.metric)
    return metric is not None and metric.unit != "count"


def _by_holm(
    limits: Sequence[GateLimit], measure: Measure, expected: Mapping[str, int], numbers: Sequence[int]
) -> dict[int, Check]:
    """Checks by number. Those that decide at the level shared by all undecided ones leave; then fewer share it."""
    checks: dict[int, Check] = {}
    open_numbers = list(numbers)
    while open_numbers:
        confidence = 1 - (1 - MIN_CONFIDENCE) / len(open_numbers)
        checks |= {n: _check(limits[n], measure(limits[n], confidence), expected)[0] for n in open_numbers}
        undecided = [n for n in open_numbers if checks[n].verdict is Verdict.UNSURE]
        if len(undecided) == len(open_numbers):
            break
        open_numbers = undecided
    return checks


def _check(entry: GateLimit, found: Measurement | str, expected: Mapping[str, int]) -> tuple[Check, bool]:
    """A check, and whether the limit could be judged."""
    problem = limit_problem(entry.figure, entry.limit)
    if problem is None:
        num_expected = 0 if entry.task or entry.slice else expected.get(entry.figure, 0)
        problem = found if isinstance(found, str) else measurement_problem(found, num_expected, entry.min_items)
    measured = None if isinstance(found, str) else found
    if problem is not None:
        return Check(entry, measured, Verdict.FAIL, f"cannot be judged: {problem}"), False
    assert measured is not None  # a text is a problem
    verdict = _verdict_of(entry.limit, measured)
    return Check(entry, measured, verdict, _reason(verdict, entry.limit, measured)), True


def _with_waiver(check: Check, day: date) -> Check:
    waiver = check.entry.waiver
    if waiver is None:
        return check
    if check.verdict is Verdict.PASS:
        return _saying(check, "the waiver is not needed")
    if waiver.until < day:
        return _saying(check, f"the waiver by {waiver.by} ended on {waiver.until} and no longer counts")
    text = f"waived by {waiver.by} until {waiver.until}: {' '.join(waiver.reason.split())}"
    return _saying(check, text, is_waived=True)


def _without_waiver(check: Check) -> Check:
    text = "what cannot be judged is not waived"
    return check if check.entry.waiver is None else _saying(check, text)


def _saying(check: Check, text: str, is_waived: bool = False) -> Check:
    return Check(check.entry, check.measurement, check.verdict, f"{check.reason}; {text}", is_waived)


def measurement_problem(measurement: Measurement, num_expected: int = 0, min_samples: int | None = None) -> str | None:
    """Why this measurement of a known metric decides nothing; None if it is sound. Open intervals are sound.

    ``num_expected`` is how many samples were asked for, ``min_samples`` the fewest that count, where those are more
    than the metric's own.
    """
    metric = metric_of(measurement.name)
    if metric is None:
        return "unknown metric"
    value, low, high = measurement.value, measurement.low, measurement.high
    num_needed = max(metric.min_samples, min_samples or 0, num_expected)
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
