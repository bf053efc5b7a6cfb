"""The report in Markdown: verdict first, then what it rests on, then what a reader needs to doubt or repeat it."""

from collections.abc import Iterator

from quantpipe.gate.report import inline, markdown_table
from quantpipe.reporting.contents import checks_table, meanings, sections_of
from quantpipe.reporting.exhibits import Bars, Code, Curves, Exhibit, Facts, Intervals, Panels, Table, Text
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.report import Report, ReportSection
from quantpipe.reporting.tables import table_behind

MOST_ROWS = 60


def render_markdown(report: Report) -> str:
    """The whole report; a plot stands there as its table, and of a long table the first rows."""
    context = report.context
    parts = [
        f"# {inline(context.recipe_name)}: {report.title}",
        f"**{report.title}**: {report.summary} Judged {context.date}.",
        bullets(report.notes),
        "## Checks",
        table_markdown(checks_table(report), right={2, 3, 5}),
        *exhibit_markdown(meanings(report.checks)),
    ]
    for section in sections_of(report):
        parts += section_markdown(section)
    return "\n\n".join(part for part in parts if part) + "\n"


def section_markdown(section: ReportSection) -> Iterator[str]:
    """A heading and what is below it."""
    yield f"## {inline(section.title)}"
    for exhibit in section.exhibits:
        yield from exhibit_markdown(exhibit, section.title)
    if not section.exhibits:
        yield section.if_empty


def exhibit_markdown(exhibit: Exhibit, under: str = "") -> Iterator[str]:
    """What an exhibit says, with its name unless that is the heading above it."""
    match exhibit:
        case Table():
            yield from _named(exhibit.name, under)
            yield table_markdown(exhibit)
        case Bars() | Panels() | Curves() | Intervals():
            yield from exhibit_markdown(table_behind(exhibit), under)
        case Facts():
            yield from _named(exhibit.name, under)
            yield bullets(tuple(f"**{inline(name)}**: {inline(value)}" for name, value in exhibit.facts))
        case Text():
            yield bullets(exhibit.lines) if exhibit.bullets else "\n\n".join(exhibit.lines)
        case Code():
            yield from _named(exhibit.name, under)
            fence = "```"
            while fence in exhibit.text:
                fence += "`"
            yield f"{fence}{exhibit.language}\n{exhibit.text}\n{fence}"


def table_markdown(table: Table, right: set[int] | None = None) -> str:
    """A table with its note; ``right`` are the columns of numbers, by default those that are not text."""
    headings = [inline(column.name) for column in table.columns]
    numbers = {index for index, column in enumerate(table.columns) if column.form != "text"} if right is None else right
    rows = [
        [shown(cell, column.form) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows[:MOST_ROWS]
    ]
    num_left = len(table.rows) - len(rows)
    more = f"\n\n{num_left:,} more rows are in report.json." if num_left > 0 else ""
    note = f"\n\n{table.note}" if table.note else ""
    return f"{markdown_table(headings, rows, right=numbers)}{more}{note}"


def bullets(lines: tuple[str, ...]) -> str:
    """A list, one line each."""
    return "\n".join(f"- {line}" for line in lines)


def _named(name: str, under: str) -> Iterator[str]:
    if name and name != under:
        yield f"**{inline(name)}**"
