"""The five files of a report, written beside the verdict."""

from pathlib import Path

from quantpipe.gate.record import REPORT_NAMES, write_text_atomically
from quantpipe.reporting.html.document import render_html
from quantpipe.reporting.json_form import render_json
from quantpipe.reporting.junit import render_junit
from quantpipe.reporting.markdown import render_markdown
from quantpipe.reporting.model_card import render_model_card
from quantpipe.reporting.report import Report

RENDERERS = dict(
    zip(REPORT_NAMES, (render_markdown, render_html, render_json, render_junit, render_model_card), strict=True)
)


def write_report(folder: Path, report: Report) -> None:
    """Write every form of the report into ``folder``, each file whole or not at all. DataError where one cannot be."""
    for name, render in RENDERERS.items():
        write_text_atomically(folder / name, render(report))
