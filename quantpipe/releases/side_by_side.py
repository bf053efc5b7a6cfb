"""Parts of several reports in one table: scores by task, what engines did, memory, errors by kind of linear."""

from collections.abc import Callable
from statistics import median

from quantpipe.releases.comparability import BENCH, EVALS, obstacle
from quantpipe.releases.opened import Judged
from quantpipe.reporting.exhibits import Bar, Bars, Cell, Column, Exhibit, Form, Panels, Table, Text
from quantpipe.reporting.report import Report, ReportSection

Row = tuple[Cell, ...]
NUM_MOST = 12


def scores_section(releases: tuple[Judged, ...]) -> ReportSection:
    """The share of right items of each task, where all were asked the same suite."""
    return _beside("scores", "Scores by task", EVALS, releases, _scores)


def bench_section(releases: tuple[Judged, ...]) -> ReportSection:
    """What the candidates' engines did, where all ran on like machines. Ratios do not show what slows both engines."""
    return _beside("speed", "Speed of the candidates", BENCH, releases, _speed)


def memory_section(releases: tuple[Judged, ...]) -> ReportSection:
    """Bytes of the candidates, by what for."""
    found = {each.name: {str(row[0]): row[1] for row in rows_of(each.report, "memory", "Memory")} for each in releases}
    names = dict.fromkeys(name for rows in found.values() for name in rows)
    rows = tuple((name, *(found[each.name].get(name) for each in releases)) for name in names)
    table = _table("Memory of the candidates", "memory", releases, rows, "bytes")
    return ReportSection("memory", "Memory of the candidates", (table,) if rows else (), "None has it on record.")


def layers_section(releases: tuple[Judged, ...]) -> ReportSection:
    """The errors that are left, by kind of linear, and the linears whose error changed most."""
    errors = {each.name: layer_errors(each.report) for each in releases}
    exhibits: list[Exhibit] = []
    kinds = dict.fromkeys(kind for found in errors.values() for kind, _ in found)
    bars = []
    for kind in kinds:
        by_release = [[error for (k, _), error in errors[each.name].items() if k == kind] for each in releases]
        bars.append(Bar(kind, tuple(median(found) if found else None for found in by_release)))
    if bars:
        names = tuple(each.name for each in releases)
        exhibits.append(Bars("Median error by kind of linear", "linear", names, tuple(bars)))
        exhibits += _most_changed(releases, errors)
    return ReportSection("layers", "Errors by layer", tuple(exhibits), "None has it on record.")


def layer_errors(report: Report) -> dict[tuple[str, int], float]:
    """What error is left of the linears of a kind in a block."""
    found: dict[tuple[str, int], float] = {}
    for section in report.sections:
        for exhibit in section.exhibits:
            if section.id == "layers" and isinstance(exhibit, Panels):
                for panel in exhibit.panels:
                    found |= {
                        (panel.name, at): error for at, error in zip(panel.positions, panel.values[-1], strict=True)
                    }
    return found


def rows_of(report: Report, section: str, table: str) -> tuple[Row, ...]:
    """The rows of a table of a report; none where it is not there."""
    for each in report.sections:
        for exhibit in each.exhibits:
            if each.id == section and isinstance(exhibit, Table) and exhibit.name == table:
                return exhibit.rows
    return ()


def _beside(
    name: str,
    title: str,
    group: str,
    releases: tuple[Judged, ...],
    values: Callable[[Report], dict[str, tuple[Cell, Form]]],
) -> ReportSection:
    """A table of what compares with the first release, and a sentence about each that does not."""
    left_out = [(each, obstacle(group, releases[0].report, each.report)) for each in releases[1:]]
    shown = (releases[0], *(each for each, why in left_out if why is None))
    sentences = tuple(f"{each.name} is not compared: {why}." for each, why in left_out if why is not None)
    found = {each.name: values(each.report) for each in shown}
    names = dict.fromkeys(label for rows in found.values() for label in rows)
    exhibits: list[Exhibit] = [Text(sentences)] if sentences else []
    forms = {label: rows[label][1] for rows in found.values() for label in rows}
    for form in dict.fromkeys(forms.values()):
        rows = tuple(
            (label, *(found[each.name].get(label, (None, form))[0] for each in shown))
            for label in names
            if forms[label] == form
        )
        exhibits.append(_table(title, "", shown, rows, form))
    return ReportSection(name, title, tuple(exhibits), "None has it on record.")


def _scores(report: Report) -> dict[str, tuple[Cell, Form]]:
    rows = rows_of(report, "suite", "Suite")
    return {
        f"{task} ({num_items} items)": (float(right or 0) / max(float(num_items or 0), 1.0), "percent")
        for task, num_items, _, right, *_ in rows
    }


def _speed(report: Report) -> dict[str, tuple[Cell, Form]]:
    found: dict[str, tuple[Cell, Form]] = {}
    for engine, concurrency, ttft_ms, tpot_ms, tok_s, *_ in rows_of(report, "bench", "Bench"):
        if engine == "candidate":
            at = f"{concurrency} at a time"
            found |= {
                f"TTFT p50, ms, {at}": (ttft_ms, "two_decimals"),
                f"TPOT p50, ms, {at}": (tpot_ms, "two_decimals"),
            }
            found[f"output tok/s, {at}"] = (tok_s, "two_decimals")
    return found


def _most_changed(releases: tuple[Judged, ...], errors: dict[str, dict[tuple[str, int], float]]) -> list[Exhibit]:
    first, last = errors[releases[0].name], errors[releases[-1].name]
    ratios = {place: last[place] / first[place] for place in first if place in last and first[place] > 0}
    ordered = sorted(ratios, key=lambda place: -max(ratios[place], 1 / max(ratios[place], 1e-12)))[:NUM_MOST]
    if not ordered:
        return []
    columns = (
        Column("linear"),
        Column("block", "count"),
        *(Column(each.name, "scientific") for each in releases),
        Column("last / first", "two_decimals"),
    )
    rows = tuple((*place, *(errors[each.name].get(place) for each in releases), ratios[place]) for place in ordered)
    return [Table("Where the error changed most", columns, rows)]


def _table(name: str, label: str, releases: tuple[Judged, ...], rows: tuple[Row, ...], form: Form) -> Table:
    columns = (Column(label), *(Column(each.name, form) for each in releases))
    return Table(name, columns, rows)
