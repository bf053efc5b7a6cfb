"""How a verdict is shown on a terminal, and the rows of results that a report is made from.

Knows plain data only: strings and numbers that other parts hand over, never tensors or engines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantpipe.gate.judge import Check, GateResult, Measurement, Verdict

if TYPE_CHECKING:
    from rich.table import Table

STYLES = {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.UNSURE: "bold yellow"}


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


def is_telling(check: Check) -> bool:
    """Whether why it came out so must be read: it did not pass, or has a waiver that says something."""
    return check.verdict is not Verdict.PASS or check.entry.waiver is not None


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
