"""The whole document: verdict, checks, sections. Its policy lets it use its own style and nothing else."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from quantpipe.gate.judge import Verdict
from quantpipe.gate.report import interval
from quantpipe.reporting.contents import checks_table, sections_of, value_with_unit
from quantpipe.reporting.exhibits import Curves, Text
from quantpipe.reporting.html.exhibits import exhibit_html, folded, plot_html, table_html
from quantpipe.reporting.plots.strip import draw_check
from quantpipe.reporting.report import CheckRow, Report, ReportSection

KINDS = {Verdict.PASS: "good", Verdict.FAIL: "bad", Verdict.UNSURE: "open"}
SIGNS = {Verdict.PASS: "✓", Verdict.FAIL: "✕", Verdict.UNSURE: "?"}


def render_html(report: Report) -> str:
    """The report as one file: style and pictures are inside, and there are no scripts."""
    context = report.context
    sections = sections_of(report)
    title = f"{context.recipe_name}: {report.title}"
    content = (_head(report), _contents(sections), _checks(report), *(section_html(each) for each in sections))
    return document(title, content)


def document(title: str, content: Iterable[str]) -> str:
    """A page with the report's style around markup that is made already."""
    style = (files(__package__) / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n'
        f"</head>\n<body>\n{chr(10).join(content)}\n</body>\n</html>\n"
    )


def section_html(section: ReportSection) -> str:
    """A section; small plots of curves that follow each other stand side by side."""
    name = escape(section.id, quote=True)
    body = _exhibits(section) if section.exhibits else f'<p class="quiet">{escape(section.if_empty)}</p>'
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(section.title)}</h2>'
        f"{body}</section>"
    )


def _head(report: Report) -> str:
    context, verdict = report.context, report.verdict
    notes = exhibit_html(Text(report.notes, bullets=True)) if report.notes else ""
    facts = (
        ("judged", context.date),
        ("artifact", context.artifact_digest[:16]),
        ("baseline", context.base_origin),
        ("machine", str(context.machine.get("cpu", "unknown"))),
        ("quantpipe", str(context.versions.get("quantpipe", "unknown"))),
    )
    tiles = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return (
        f'<header><p class="eyebrow">Release candidate</p><h1>{escape(context.recipe_name)}</h1>'
        f'<div class="verdict {KINDS[verdict]}" id="verdict"><strong><span aria-hidden="true">{SIGNS[verdict]} </span>'
        f"{escape(report.title)}</strong><p>{escape(report.summary[:1].upper() + report.summary[1:])}</p></div>"
        f'<dl class="tiles">{tiles}</dl>{notes}</header>'
    )


def _contents(sections: Sequence[ReportSection]) -> str:
    links = [("checks", "Checks"), *((section.id, section.title) for section in sections)]
    items = "".join(f'<li><a href="#{escape(name, quote=True)}">{escape(title)}</a></li>' for name, title in links)
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


def _checks(report: Report) -> str:
    table = folded("The checks as a table", table_html(checks_table(report), False, False))
    rows = "".join(_check(check) for check in report.checks)
    return (
        f'<section id="checks" aria-labelledby="checks-title"><h2 id="checks-title">Checks</h2>{rows}'
        f'<p class="note">{escape(report.correction)}</p>{table}</section>'
    )


def _check(check: CheckRow) -> str:
    measured = check.measurement
    if measured is None:
        value = "not measured"
    else:
        value = f"{value_with_unit(measured)}; interval {interval(measured)}; n {measured.num_samples:,}"
    why = [check.reason, *check.remarks]
    return (
        f'<div class="check"><div><h3><span class="chip {KINDS[check.verdict]}">{escape(check.outcome)}</span>'
        f"{escape(check.metric)} {escape(check.limit)}</h3>"
        f'<p class="value">{escape(value)}</p><p class="note">{escape(check.meaning)}</p>'
        f"{''.join(f'<p>{escape(each)}</p>' for each in why)}</div>{draw_check(check)}</div>"
    )


def _exhibits(section: ReportSection) -> str:
    parts: list[str] = []
    row: list[Curves] = []

    def end_row() -> None:
        if row:
            parts.append(f'<div class="plots">{"".join(plot_html(each, section.title) for each in row)}</div>')
            row.clear()

    for exhibit in section.exhibits:
        if isinstance(exhibit, Curves):
            row.append(exhibit)
            continue
        end_row()
        parts.append(exhibit_html(exhibit, section.title))
    end_row()
    return "".join(parts)
