"""What each kind of exhibit looks like in HTML: a picture with its table folded behind it, a table, a list, text."""

from dataclasses import replace
from html import escape

from quantpipe.reporting.exhibits import Bars, Code, Curves, Exhibit, Facts, Intervals, Panels, Plot, Table, Text
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.plots.bars import draw_bars
from quantpipe.reporting.plots.curves import draw_curves
from quantpipe.reporting.plots.intervals import draw_intervals
from quantpipe.reporting.plots.panels import draw_key, draw_panels
from quantpipe.reporting.tables import table_behind

MOST_SHORT_CHARS = 28
MOST_ROWS_DRAWN = 40  # as many fit on a page of paper


def exhibit_html(exhibit: Exhibit, under: str = "") -> str:
    """The markup of an exhibit; its name is left out where it is that of the heading above."""
    match exhibit:
        case Bars() | Panels() | Curves() | Intervals():
            return plot_html(exhibit, under)
        case Table():
            if not exhibit.long:
                return table_html(exhibit, has_caption=exhibit.name != under)
            left_out = f'<p class="paper note">{escape(exhibit.name)}: in the file itself.</p>'
            return folded(exhibit.name, table_html(exhibit, has_caption=False)) + left_out
        case Facts():
            return _heading(exhibit.name, under) + facts_html(exhibit)
        case Text():
            tag, around = ("li", "ul") if exhibit.bullets else ("p", "div")
            return f"<{around}>{''.join(f'<{tag}>{escape(each)}</{tag}>' for each in exhibit.lines)}</{around}>"
        case Code():
            return _heading(exhibit.name, under) + f'<pre tabindex="0"><code>{escape(exhibit.text)}</code></pre>'


def plot_html(plot: Plot, under: str) -> str:
    """A figure; one that has nothing to draw says so."""
    table = table_behind(plot)
    caption = f"<figcaption>{escape(plot.name)}</figcaption>" if plot.name != under else ""
    if not table.rows:
        return f'<figure>{caption}<p class="quiet">Nothing was measured.</p></figure>'
    left_out = _left_out(plot)
    text = " ".join(part for part in (plot.note, left_out) if part)
    note = f'<p class="note">{escape(text)}</p>' if text else ""
    key = draw_key(plot) if isinstance(plot, Panels) and len(plot.series) > 1 else ""
    pictures = f'{key}<div class="plots">{"".join(_draw(plot))}</div>'
    numbers = folded("The numbers", table_html(table, has_caption=False, has_note=False))
    return f"<figure>{caption}{pictures}{note}{numbers}</figure>"


def table_html(table: Table, has_caption: bool = True, has_note: bool = True) -> str:
    """A table with headings; numbers stand to the right."""
    kinds = [_kind(table, index) for index in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{kind}>{escape(each.name)}</th>' for each, kind in zip(table.columns, kinds, strict=True)
    )
    rows = []
    for row in table.rows:
        cells = zip(row, table.columns, kinds, strict=True)
        rows.append("".join(f"<td{kind}>{escape(shown(cell, each.form))}</td>" for cell, each, kind in cells))
    caption = f"<caption>{escape(table.name)}</caption>" if has_caption and table.name else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note and has_note else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def _kind(table: Table, index: int) -> str:
    """Numbers stand to the right; a column of short texts is not broken."""
    if table.columns[index].form != "text":
        return ' class="number"'
    longest = max((len(shown(row[index], "text")) for row in table.rows), default=0)
    return ' class="short"' if longest <= MOST_SHORT_CHARS else ""


def facts_html(facts: Facts, kind: str = "facts") -> str:
    """Names and what they are."""
    pairs = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.facts)
    return f'<dl class="{kind}">{"".join(pairs)}</dl>'


def folded(summary: str, content: str) -> str:
    """Content that is shown when asked for, and never on paper."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _left_out(plot: Plot) -> str:
    """What is said of rows beyond those that are drawn."""
    num_rows = len(plot.bars) if isinstance(plot, Bars) else len(plot.rows) if isinstance(plot, Intervals) else 0
    return f"The first {MOST_ROWS_DRAWN} of {num_rows:,} are drawn." if num_rows > MOST_ROWS_DRAWN else ""


def _draw(plot: Plot) -> list[str]:
    match plot:
        case Bars():
            return [draw_bars(replace(plot, bars=plot.bars[:MOST_ROWS_DRAWN]))]
        case Panels():
            return draw_panels(plot)
        case Curves():
            return [draw_curves(plot)]
        case Intervals():
            return [draw_intervals(replace(plot, rows=plot.rows[:MOST_ROWS_DRAWN]))]


def _heading(name: str, under: str) -> str:
    return f"<h3>{escape(name)}</h3>" if name and name != under else ""
