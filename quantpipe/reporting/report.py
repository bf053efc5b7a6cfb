"""A report as data: the verdict, its checks, and sections of exhibits. Every file is rendered from it.

Holds no path of the machine that made it (``paths`` shortens them) and no text that a model was asked or said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict

from quantpipe.gate.judge import Check, GateResult, Measurement, Verdict
from quantpipe.gate.limits import Limit
from quantpipe.gate.metrics import metric_of
from quantpipe.gate.record import RunContext
from quantpipe.reporting.exhibits import STRICT, Exhibit

NOT_RUN = "Not run."
JUDGED = "Intervals are two-sided; PASS needs the whole interval inside the limit, FAIL the whole interval outside. "
CORRECTIONS = {
    "none": "Each check is judged on its own: the intervals are not corrected for the number of checks. As all must"
    " pass, the chance to release what misses a limit is no greater than with one check; the chance that one of many"
    " fails is.",
    "holm": "The intervals are widened by Holm's method for the number of checks: that any PASS or FAIL among them is"
    " wrong has at most the chance of one check.",
}


@dataclass(frozen=True)
class CheckRow:
    """One limit and what became of it. ``bound`` and ``side`` are None and empty where nothing can be drawn.

    ``outcome`` is the verdict as it is shown, ``remarks`` what else a reader must know, such as a waiver.
    ``is_blocking``: whether UNSURE or FAIL stops the release; a waiver or a gate that only warns lets it be.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    metric: str
    meaning: str
    limit: str
    bound: float | None
    side: Literal["max", "min", ""]
    verdict: Verdict
    reason: str
    measurement: Measurement | None
    outcome: str
    is_blocking: bool = True
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportSection:
    """A heading, and what is below it. Without exhibits it says ``if_empty``. ``id`` names it for links and readers."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    id: str
    title: str
    exhibits: tuple[Exhibit, ...] = ()
    if_empty: str = NOT_RUN


@dataclass(frozen=True)
class Report:
    """Everything that is known of one judged release.

    ``title`` is the verdict as it is shown. ``measurements`` are those without a limit. ``correction`` says how the
    number of checks counts. ``data`` are digests of what was asked, by what it is: figures of two
    reports may be compared where these agree. ``commands`` reproduce it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    context: RunContext
    verdict: Verdict
    title: str
    summary: str
    checks: tuple[CheckRow, ...]
    correction: str
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    sections: tuple[ReportSection, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    recipe: str = ""
    commands: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportParts:
    """What a report says besides the verdict (see ``Report``): kept, so that another verdict may be reached from it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    context: RunContext
    notes: tuple[str, ...] = ()
    sections: tuple[ReportSection, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()


def report_of(
    result: GateResult,
    context: RunContext,
    notes: Sequence[str] = (),
    sections: Sequence[ReportSection] = (),
    data: Mapping[str, str] | None = None,
    recipe: str = "",
    commands: Sequence[str] = (),
) -> Report:
    """The report on a verdict. Sections that share an id are joined, in the place of the first."""
    return Report(
        context=replace(context, machine=_plain_machine(context.machine)),
        verdict=result.verdict,
        title=result.title,
        summary=summary_of(result),
        checks=tuple(check_row(check) for check in result.checks),
        correction=JUDGED + CORRECTIONS[result.correction],
        measurements=result.informational,
        notes=tuple(" ".join(note.split()) for note in notes),
        sections=joined(sections),
        data=dict(data or {}),
        recipe=recipe,
        commands=tuple(commands),
    )


def _plain_machine(machine: Mapping[str, str | int]) -> dict[str, str | int]:
    """Without what the builder of a kernel appended to its version."""
    return {key: str(value).partition("-")[0] if key == "system" else value for key, value in machine.items()}


def check_row(check: Check) -> CheckRow:
    """A check for people: the limit as text and as a place on an axis."""
    metric, (side, bound) = metric_of(check.metric), side_of(check.limit)
    return CheckRow(
        metric=check.entry.label,
        meaning="" if metric is None else metric.text,
        limit=str(check.limit),
        bound=bound,
        side=side,
        verdict=check.verdict,
        reason=check.reason,
        measurement=check.measurement,
        outcome=check.outcome,
        is_blocking=not (check.is_waived or check.is_warning),
    )


def side_of(limit: Limit) -> tuple[Literal["max", "min"], float]:
    """Which side of its bound a limit forbids, and the bound."""
    return ("max" if limit.max is not None else "min"), limit.bound


def summary_of(result: GateResult) -> str:
    """The verdict in a sentence, without the word itself."""
    counts = {verdict: sum(check.verdict is verdict for check in result.checks) for verdict in Verdict}
    total = len(result.checks)
    if result.verdict is Verdict.PASS and counts[Verdict.PASS] < total:
        waived = [f"{c.entry.label} is {c.verdict}, {c.reason}" for c in result.checks if c.is_waived]
        warned = [f"{c.entry.label} is UNSURE and only warns" for c in result.checks if c.is_warning]
        told = "".join(f" {text}." for text in waived + warned)
        return f"{counts[Verdict.PASS]} of {total} checks pass; the candidate may be released.{told}"
    if result.verdict is Verdict.PASS:
        return f"all {total} checks pass; the candidate may be released."
    if result.verdict is Verdict.UNSURE:
        return f"{counts[Verdict.UNSURE]} of {total} checks cannot be decided from these samples; none fails."
    return f"{counts[Verdict.FAIL]} of {total} checks fail; the candidate must not be released."


def joined(sections: Sequence[ReportSection]) -> tuple[ReportSection, ...]:
    """Sections in order, those of one id as one."""
    found: dict[str, ReportSection] = {}
    for section in sections:
        first = found.get(section.id)
        found[section.id] = (
            section
            if first is None
            else ReportSection(first.id, first.title, (*first.exhibits, *section.exhibits), first.if_empty)
        )
    return tuple(found.values())
