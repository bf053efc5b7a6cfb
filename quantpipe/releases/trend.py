"""Releases of an archive over time: a table, and a small plot of each figure."""

from html import escape

from quantpipe.gate.report import figure
from quantpipe.releases.archive import Release
from quantpipe.releases.comparability import ASKED, BENCH, group_of
from quantpipe.reporting.contents import slice_of
from quantpipe.reporting.exhibits import Column, Curve, Curves, Exhibit, Point, Table
from quantpipe.reporting.html.document import document, section_html
from quantpipe.reporting.markdown import table_markdown
from quantpipe.reporting.report import ReportSection

MOST_IN_TABLE = 6


def trend_markdown(releases: tuple[Release, ...]) -> str:
    """A row for each release, oldest first."""
    return table_markdown(trend_table(releases)) + "\n"


def trend_html(releases: tuple[Release, ...], problems: tuple[str, ...] = ()) -> str:
    """The table and the plots, as a document that loads nothing."""
    head = f"<header><h1>{len(releases)} releases</h1></header>"
    notes = "".join(f"<p>{escape(problem)}</p>" for problem in problems)
    return document(
        "Releases over time",
        (
            head + notes,
            section_html(ReportSection("releases", "Releases", (trend_table(releases),))),
            section_html(ReportSection("figures", "Figures over time", trend_plots(releases))),
        ),
    )


def trend_table(releases: tuple[Release, ...]) -> Table:
    """Dates, verdicts, and the figures that most releases have."""
    metrics = _metrics(releases)[:MOST_IN_TABLE]
    columns = (Column("judged"), Column("release"), Column("verdict"), Column("versions"), *map(Column, metrics))
    rows = tuple(
        (
            each.date[:16],
            each.id,
            each.verdict,
            f"quantpipe {each.versions.get('quantpipe', '-')}, torch {each.versions.get('torch', '-')}",
            *(_shown(each, metric) for metric in metrics),
        )
        for each in releases
    )
    return Table("Releases", columns, rows)


def trend_plots(releases: tuple[Release, ...]) -> tuple[Exhibit, ...]:
    """A plot for each figure. A line is of one recipe; where its figures do not compare there is another line."""
    labels = tuple(each.date[:10] for each in releases)
    plots = []
    for metric in _metrics(releases):
        lines: dict[str, list[Point]] = {}
        for number, release in enumerate(releases):
            value, low, high = release.figures.get(metric, (None, None, None))
            if value is not None:
                lines.setdefault(_line_of(release, metric, releases), []).append(Point(number, value, low, high))
        curves = tuple(Curve(name, tuple(points)) for name, points in lines.items())
        if curves:
            plots.append(
                Curves(metric, "release, oldest first", metric, curves, "figure", from_zero=False, x_labels=labels)
            )
    return tuple(plots)


def _line_of(release: Release, metric: str, releases: tuple[Release, ...]) -> str:
    """Figures are joined where they compare: of one recipe, asked the same, and bench figures of one machine."""
    group = group_of(metric)
    places = {each.id: _rests_on(each, group) for each in releases if each.recipe == release.recipe}
    distinct = list(dict.fromkeys(places.values()))
    return release.recipe if len(distinct) == 1 else f"{release.recipe} ({distinct.index(places[release.id]) + 1})"


def _rests_on(release: Release, group: str) -> tuple[str, ...]:
    asked = release.data.get(ASKED[group], "") if group in ASKED else ""
    return release.base_digest, asked, release.machine if group == BENCH else ""


def _metrics(releases: tuple[Release, ...]) -> list[str]:
    """Figures of no slice, those first that most releases have."""
    counts: dict[str, int] = {}
    for release in releases:
        for name in release.figures:
            if slice_of(name) is None and not name.startswith("manifest"):
                counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])


def _shown(release: Release, metric: str) -> str | None:
    value, low, high = release.figures.get(metric, (None, None, None))
    if value is None:
        return None
    return figure(value) if low is None or high is None else f"{figure(value)} ({figure(low)} .. {figure(high)})"
