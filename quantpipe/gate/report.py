"""How a verdict is shown: the terminal's table and the Markdown report.

Knows plain data only: strings and numbers that other parts hand over, never tensors or engines.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantpipe.gate.judge import Check, GateResult, Measurement, Verdict
from quantpipe.gate.metrics import metric_of
from quantpipe.gate.record import RunContext

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.UNSURE: "bold yellow"}
MAX_FLIP_ROWS = 40
_CORRECTIONS = {
    "none": "Each check is judged on its own: the intervals are not corrected for the number of checks. As all must"
    " pass, the chance to release what misses a limit is no greater than with one check; the chance that one of many"
    " fails is.",
    "holm": "The intervals are widened by Holm's method for the number of checks: that any PASS or FAIL among them is"
    " wrong has at most the chance of one check.",
}
CHECK_HEADINGS = ("verdict", "metric", "limit", "measured", "interval", "n", "why")


@dataclass(frozen=True)
class ScoreRow:
    """A task's (or domain's) paired result: how many items each got right, and flips in both directions.

    ``num_changed`` predictions differ, right or wrong; ``num_near_ties`` of the flips were all but undecided before.
    ``mcnemar_p`` is that of the exact test. ``recovery`` is candidate / baseline with its interval, as text.
    """

    task: str
    num_items: int
    baseline_correct: int
    candidate_correct: int
    num_lost: int
    num_gained: int
    num_changed: int = 0
    num_near_ties: int = 0
    mcnemar_p: float = 1.0
    recovery: str = "-"


@dataclass(frozen=True)
class FlipRow:
    """Flipped items of one cluster, by name alone: nothing of what was asked or answered."""

    task: str
    cluster: str
    lost: tuple[str, ...]
    gained: tuple[str, ...]
    num_near_ties: int


@dataclass(frozen=True)
class BenchRow:
    """What one engine did at one concurrency: medians over ``num_requests``, seconds and tokens per second."""

    engine: str
    concurrency: int
    num_requests: int
    ttft_p50_s: float
    tpot_p50_s: float
    output_tok_s: float


@dataclass(frozen=True)
class ParityRow:
    """Two ways of computing the same logits: the largest difference found and the one allowed."""

    comparison: str
    found: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Within tolerance; NaN never is."""
        return self.found <= self.tolerance


@dataclass(frozen=True)
class ReportSections:
    """Everything the Markdown report says besides the checks. An empty part is reported as not run.

    ``quantization`` and ``divergence`` are facts in order, such as ("scheme", "w8a8"). ``notes`` are caveats the reader
    must know, such as that the baseline is itself dequantized. ``commands`` reproduce the run.
    """

    context: RunContext
    notes: Sequence[str] = ()
    scores: Sequence[ScoreRow] = ()
    flips: Sequence[FlipRow] = ()
    divergence: Sequence[tuple[str, str]] = ()
    bench: Sequence[BenchRow] = ()
    parity: Sequence[ParityRow] = ()
    quantization: Sequence[tuple[str, str]] = ()
    commands: Sequence[str] = ()


def figure(value: float) -> str:
    """A number for people: four significant digits, no exponent where it can be avoided."""
    if not math.isfinite(value):
        return {math.inf: "+inf", -math.inf: "-inf"}.get(value, "nan")
    return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def interval_ends(measurement: Measurement) -> str:
    """``0.98 .. 1.03``, or ``none`` where there is no interval."""
    if math.isinf(measurement.low) and math.isinf(measurement.high):
        return "none"
    return f"{figure(measurement.low)} .. {figure(measurement.high)}"


def interval(measurement: Measurement) -> str:
    """``0.98 .. 1.03 (90 %)``, or ``none`` where there is no interval."""
    ends = interval_ends(measurement)
    return ends if ends == "none" else f"{ends} ({100 * measurement.confidence:g} %)"


def check_cells(check: Check) -> tuple[str, str, str, str, str, str, str]:
    """One check as text: verdict, metric, limit, value with unit, interval, n, reason."""
    measured = check.measurement
    label = check.entry.label
    if measured is None:
        return check.outcome, label, str(check.limit), "-", "-", "-", check.reason
    unit = "" if measured.unit == "ratio" else f" {measured.unit}"
    value = f"{figure(measured.value)}{unit}"
    num_samples = f"{measured.num_samples:,}"
    return check.outcome, label, str(check.limit), value, interval(measured), num_samples, check.reason


def render_table(result: GateResult) -> "Table":
    """The checks as a table for rich's console that fits 80 columns; below it, why any check did not pass."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    confidences = sorted({f"{100 * c.measurement.confidence:g}" for c in result.checks if c.measurement is not None})
    table = Table(
        title=Text(f"Gate: {result.title}", style=STYLES[result.verdict]),
        title_justify="left",
        caption=Text("\n".join(f"{c.entry.label}: {c.reason}" for c in result.checks if is_telling(c))),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in ("", "metric", "limit", "measured", f"{'/'.join(confidences) or 90} % interval", "n"):
        table.add_column(heading, justify="right" if heading in ("limit", "measured", "n") else "left")
    for check in result.checks:
        verdict, metric, limit, value, _, num_samples, _ = check_cells(check)
        ends = "-" if check.measurement is None else interval_ends(check.measurement)
        row = (Text(cell) for cell in (metric, limit, value, ends, num_samples))
        table.add_row(Text(verdict, style=STYLES[check.verdict]), *row)
    return table


def render_markdown(result: GateResult, sections: ReportSections) -> str:
    """The report: verdict first, then what it rests on, then everything a reader needs to doubt or repeat it."""
    context = sections.context
    notes = [" ".join(note.split()) for note in sections.notes]
    parts = [
        f"# {inline(context.recipe_name)}: {result.title}",
        f"{_verdict_sentence(result)} Judged {context.date}.",
        _bullets(notes),
        "## Checks",
        markdown_table(CHECK_HEADINGS, [check_cells(check) for check in result.checks], right={2, 3, 5}),
        f"Intervals are two-sided; PASS needs the whole interval inside the limit, FAIL the whole interval outside. "
        f"{_CORRECTIONS[result.correction]}",
        _meanings(result),
        "## Measured without a limit",
        _informational(result.informational),
        "## Divergence",
        _facts(dict(sections.divergence), "Not run."),
        "## Suite",
        _scores(sections.scores),
        _flips(sections.flips),
        "## Bench",
        _bench(sections.bench),
        "## Parity",
        _parity(sections.parity),
        "## Quantization",
        _facts(dict(sections.quantization), "The base model is released as it is."),
        "## What this verdict is bound to",
        _facts(_bound_to(context), ""),
        "## How to reproduce",
        _code(sections.commands),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict_sentence(result: GateResult) -> str:
    counts = {verdict: sum(check.verdict is verdict for check in result.checks) for verdict in Verdict}
    total = len(result.checks)
    if result.verdict is Verdict.PASS:
        waived = [
            f"`{check.entry.label}` is {check.verdict}, {check.reason}" for check in result.checks if check.is_waived
        ]
        warned = [f"`{check.entry.label}` is UNSURE and only warns" for check in result.checks if check.is_warning]
        passed = "all" if not waived + warned else f"{counts[Verdict.PASS]} of"
        told = "".join(f" {inline(text)}." for text in waived + warned)
        return f"**{result.title}**: {passed} {total} checks pass; the candidate may be released.{told}"
    if result.verdict is Verdict.UNSURE:
        return (
            f"**UNSURE**: {counts[Verdict.UNSURE]} of {total} checks cannot be decided from these samples; none fails."
        )
    return f"**FAIL**: {counts[Verdict.FAIL]} of {total} checks fail; the candidate must not be released."


def _meanings(result: GateResult) -> str:
    meanings = {check.metric: metric_of(check.metric) for check in result.checks}
    return _bullets([f"`{name}`: {metric.text} ({metric.unit})" for name, metric in meanings.items() if metric])


def _informational(measurements: Sequence[Measurement]) -> str:
    rows = [(m.name, figure(m.value), m.unit, interval(m), f"{m.num_samples:,}", m.detail) for m in measurements]
    return markdown_table(("metric", "measured", "unit", "interval", "n", "detail"), rows, right={1, 4})


def _scores(scores: Sequence[ScoreRow]) -> str:
    headings = ("task", "items", "baseline correct", "candidate correct", "lost", "gained", "changed", "near ties",
                "McNemar p", "recovery")  # fmt: skip
    rows = [
        (s.task, s.num_items, s.baseline_correct, s.candidate_correct, s.num_lost, s.num_gained, s.num_changed,
         s.num_near_ties, figure(s.mcnemar_p), s.recovery)
        for s in scores
    ]  # fmt: skip
    return markdown_table(headings, rows, right=set(range(1, 9)))


def _flips(flips: Sequence[FlipRow]) -> str:
    if not flips:
        return ""
    shown = flips[:MAX_FLIP_ROWS]
    rows = [(f.task, f.cluster, ", ".join(f.lost), ", ".join(f.gained), f.num_near_ties) for f in shown]
    table = markdown_table(("task", "cluster", "lost", "gained", "near ties"), rows, right={4})
    rest = f"\n\n{len(flips) - len(shown)} more clusters have flips." if len(flips) > len(shown) else ""
    return f"Flipped items by cluster; those of one cluster are one observation.\n\n{table}{rest}"


def _bench(bench: Sequence[BenchRow]) -> str:
    headings = ("engine", "concurrency", "TTFT p50, ms", "TPOT p50, ms", "output tok/s", "requests")
    rows = [
        (b.engine, b.concurrency, f"{1e3 * b.ttft_p50_s:.1f}", f"{1e3 * b.tpot_p50_s:.2f}", f"{b.output_tok_s:.1f}",
         b.num_requests)
        for b in bench
    ]  # fmt: skip
    return markdown_table(headings, rows, right={1, 2, 3, 4, 5})


def _parity(parity: Sequence[ParityRow]) -> str:
    rows = [(p.comparison, f"{p.found:.2e}", f"{p.tolerance:.2e}", "yes" if p.agrees else "NO") for p in parity]
    return markdown_table(("comparison", "largest difference", "tolerance", "agrees"), rows, right={1, 2})


def is_telling(check: Check) -> bool:
    """Whether why it came out so must be read: it did not pass, or has a waiver that says something."""
    return check.verdict is not Verdict.PASS or check.entry.waiver is not None


def _bound_to(context: RunContext) -> dict[str, str]:
    facts = {
        "recipe": f"{context.recipe_name} ({context.recipe_digest})",
        "artifact": context.artifact_digest,
        "baseline": f"{context.base_origin} ({context.base_digest})",
        "suite": context.suite_digest,
        "held-out text": context.text_digest,
        "engine": _pairs(context.engine),
        "versions": _pairs(context.versions),
        "engine and versions": context.engine_digest,
        "machine": _pairs(context.machine),
        "measured": context.measured,
    }
    return {name: value for name, value in facts.items() if value}


def _pairs(mapping: Mapping[str, str | int | float | None]) -> str:
    return ", ".join(f"{key} {value}" for key, value in mapping.items())


def _facts(facts: Mapping[str, str], if_empty: str) -> str:
    return _bullets([f"**{name}**: {value}" for name, value in facts.items()]) if facts else if_empty


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _code(commands: Sequence[str]) -> str:
    return "```sh\n" + "\n".join(commands) + "\n```" if commands else "Not recorded."


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: set[int]) -> str:
    """A GitHub table; ``right`` are the columns of numbers. Without rows: "Not run"."""
    if not rows:
        return "Not run."
    rule = ["---:" if column in right else "---" for column in range(len(headings))]
    lines = [headings, rule, *([inline(str(cell)) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def inline(text: str) -> str:
    """Text that cannot break out of its table cell or line."""
    return " ".join(text.split()).replace("|", "\\|")
