"""Releases side by side: every figure with its interval, and whether it moved. The first is what others are held to.

Two figures moved apart where their intervals do not meet. That is a stricter test than one of their difference: what
overlaps may differ all the same, and is called no difference shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantpipe.gate.judge import Measurement
from quantpipe.gate.metrics import metric_of
from quantpipe.gate.report import figure, interval_ends
from quantpipe.releases.comparability import (
    BENCH,
    COUNTS,
    EVALS,
    FIDELITY,
    group_of,
    kinship,
    obstacle,
    versions_changed,
)
from quantpipe.releases.opened import Judged
from quantpipe.releases.side_by_side import bench_section, layers_section, memory_section, scores_section
from quantpipe.reporting.contents import slice_of
from quantpipe.reporting.exhibits import Column, Exhibit, Interval, Intervals, Table, Text
from quantpipe.reporting.report import Report, ReportSection

Moved = Literal["better", "worse", "no difference shown", "not compared", "missing"]
TITLES = {
    EVALS: "Evals",
    FIDELITY: "Fidelity",
    BENCH: "Bench, against the base model of the same run",
    COUNTS: "Integrity",
}


@dataclass(frozen=True)
class FigureChange:
    """One figure of a release beside that of the first. ``why`` says why it is not compared."""

    metric: str
    release: str
    moved: Moved
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """What to read first, and sections. ``changes`` are of every release but the first."""

    names: tuple[str, ...]
    notes: tuple[str, ...]
    changes: tuple[FigureChange, ...]
    sections: tuple[ReportSection, ...]


def compare_releases(releases: tuple[Judged, ...]) -> Comparison:
    """Compare at least two releases with the first of them."""
    first, others = releases[0], releases[1:]
    figures = {each.name: figures_by_name(each.report) for each in releases}
    metrics = dict.fromkeys(name for found in figures.values() for name in found)
    changes = tuple(_change(metric, first, other, figures) for other in others for metric in metrics)
    notes: list[str] = []
    for other in others:
        notes += _notes(first, other, [each for each in changes if each.release == other.name])
    sections = [_releases(releases)]
    for group in (EVALS, FIDELITY, BENCH, COUNTS):
        found = [metric for metric in metrics if group_of(metric) == group]
        if found:
            sections.append(_figures(group, found, releases, figures, changes))
    sections += [scores_section(releases), bench_section(releases), memory_section(releases), layers_section(releases)]
    return Comparison(tuple(each.name for each in releases), tuple(notes), changes, tuple(sections))


def figures_by_name(report: Report) -> dict[str, Measurement]:
    """Everything that a release measured."""
    judged = (check.measurement for check in report.checks if check.measurement is not None)
    return {each.name: each for each in (*judged, *report.measurements)}


def _change(
    metric: str, first: Judged, other: Judged, figures: Mapping[str, Mapping[str, Measurement]]
) -> FigureChange:
    ours, theirs = figures[first.name].get(metric), figures[other.name].get(metric)
    if ours is None or theirs is None:
        without = first if ours is None else other
        return FigureChange(metric, other.name, "missing", f"{without.name} did not measure it")
    why = obstacle(group_of(metric), first.report, other.report)
    if why is not None:
        return FigureChange(metric, other.name, "not compared", why)
    return FigureChange(metric, other.name, moved(metric, ours, theirs))


def moved(metric: str, ours: Measurement, theirs: Measurement) -> Moved:
    """Whether two figures' intervals are apart, and which way."""
    place = slice_of(metric)
    meaning = metric_of(metric if place is None else place[0])
    lower_is_better = meaning is None or meaning.better == "lower"
    if theirs.low > ours.high:
        return "worse" if lower_is_better else "better"
    if theirs.high < ours.low:
        return "better" if lower_is_better else "worse"
    return "no difference shown"


def _notes(first: Judged, other: Judged, changes: list[FigureChange]) -> list[str]:
    notes = [kinship(first, other)]
    worse = [change.metric for change in changes if change.moved == "worse"]
    better = [change.metric for change in changes if change.moved == "better"]
    is_runtime = first.report.context.artifact_digest == other.report.context.artifact_digest and bool(
        versions_changed(first.report, other.report)
    )
    if worse:
        what = "Runtime regression" if is_runtime else "Worse"
        notes.append(f"{what}, {other.name} beside {first.name}: {', '.join(worse)}.")
    elif is_runtime:
        notes.append(f"No runtime regression is shown: of {other.name}, no figure that compares is worse.")
    if better:
        notes.append(f"Better, {other.name} beside {first.name}: {', '.join(better)}.")
    for why in dict.fromkeys(change.why for change in changes if change.moved == "not compared"):
        left_out = [change.metric for change in changes if change.why == why]
        notes.append(f"Not compared, {other.name} beside {first.name}: {', '.join(left_out)}: {why}.")
    return notes


def _releases(releases: tuple[Judged, ...]) -> ReportSection:
    contexts = [each.report.context for each in releases]
    rows: list[tuple[str, list[str]]] = [
        ("verdict", [each.report.title for each in releases]),
        ("judged", [context.date for context in contexts]),
        ("recipe", [f"{context.recipe_name} ({context.recipe_digest[:12]})" for context in contexts]),
        ("artifact", [context.artifact_digest[:12] for context in contexts]),
        ("base model", [context.base_digest[:12] for context in contexts]),
        ("quantpipe", [context.versions.get("quantpipe", "-") for context in contexts]),
        ("torch", [context.versions.get("torch", "-") for context in contexts]),
        ("machine", [str(context.machine.get("cpu", "-")) for context in contexts]),
    ]
    columns = (Column(""), *(Column(each.name) for each in releases))
    table = Table("Releases", columns, tuple((name, *values) for name, values in rows))
    return ReportSection("releases", "Releases", (table,))


def _figures(
    group: str,
    metrics: list[str],
    releases: tuple[Judged, ...],
    figures: Mapping[str, Mapping[str, Measurement]],
    changes: tuple[FigureChange, ...],
) -> ReportSection:
    told = {(change.metric, change.release): change for change in changes}
    columns = [Column("metric"), Column(releases[0].name)]
    for other in releases[1:]:
        columns += [Column(other.name), Column("moved")]
    rows, plots = [], list[Exhibit]()
    for metric in metrics:
        cells = [metric, _with_ends(figures[releases[0].name].get(metric))]
        for other in releases[1:]:
            change = told[metric, other.name]
            why = f": {change.why}" if change.why else ""
            cells += [_with_ends(figures[other.name].get(metric)), f"{change.moved}{why}"]
        rows.append(tuple(cells))
        found = [(each.name, figures[each.name][metric]) for each in releases if metric in figures[each.name]]
        if group != COUNTS and len(found) > 1:
            lines = tuple(Interval(name, m.value, m.low, m.high, m.num_samples) for name, m in found)
            plots.append(Intervals(metric, "release", found[0][1].unit, lines, found[0][1].confidence))
    table = Table(TITLES[group], tuple(columns), tuple(rows))
    return ReportSection(group, TITLES[group], (table, *plots))


def _with_ends(measured: Measurement | None) -> str:
    return "-" if measured is None else f"{figure(measured.value)} ({interval_ends(measured)})"


def notes_text(comparison: Comparison) -> Text:
    """What to read first."""
    return Text(comparison.notes, bullets=True)
