"""What was found, for people: a line each for facts, a table for each part of a GPU check."""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantpipe.doctor.facts import Fact
from quantpipe.doctor.record import PartResult, Row

MARKS = {"ok": "ok", "note": "--", "fault": "!!"}


def fact_lines(facts: Iterable[Fact]) -> Iterable[str]:
    """``ok  torch: 2.13.0``; ``--`` marks what is missing and need not be, ``!!`` what must not be."""
    return (f"{MARKS[fact.state]}  {fact.subject}: {fact.found}" for fact in facts)


def show_part(console: Console, title: str, result: PartResult) -> None:
    """Its heading, and its rows; of kernels that are right only how many there are."""
    ending = f"{result.state} in {result.seconds:.1f} s" if result.state != "absent" else "not run"
    reason = f": {result.reason}" if result.reason else ""
    console.print(escape(f"{title}: {ending}{reason}"), style="bold", highlight=False, soft_wrap=True)
    rows = _worth_showing(result.rows)
    if len(rows) < len(result.rows):
        console.print(f"{len(result.rows) - len(rows)} of {len(result.rows)} cases are right")
    if rows:
        console.print(_table(rows))


def _worth_showing(rows: list[Row]) -> list[Row]:
    is_long = len(rows) > 12
    return [row for row in rows if not (is_long and "error" in row and row.get("ok") is True)]


def _table(rows: list[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(escape(_text(row.get(name))) for name in columns))
    return table


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
