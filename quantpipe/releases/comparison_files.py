"""A comparison as Markdown for the terminal, as JSON, and as one HTML file."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from typing import Any

from quantpipe.releases.comparison import Comparison, figures_by_name, notes_text
from quantpipe.releases.opened import Judged
from quantpipe.reporting.exhibits import Intervals
from quantpipe.reporting.html.document import document, section_html
from quantpipe.reporting.html.exhibits import exhibit_html
from quantpipe.reporting.markdown import exhibit_markdown, section_markdown
from quantpipe.reporting.report import ReportSection

SCHEMA = "quantpipe.comparison/1"


def comparison_markdown(comparison: Comparison) -> str:
    """What to read first, then tables. Intervals stand in the tables, so that their plots are left out."""
    parts = [*exhibit_markdown(notes_text(comparison))]
    for section in comparison.sections:
        tables = tuple(each for each in section.exhibits if not isinstance(each, Intervals))
        parts += section_markdown(ReportSection(section.id, section.title, tables, section.if_empty))
    return "\n\n".join(parts) + "\n"


def comparison_html(comparison: Comparison) -> str:
    """The same with plots, as a document that loads nothing."""
    title = "Releases compared"
    head = f"<header><h1>{escape(title)}: {escape(', '.join(comparison.names))}</h1>"
    sections = (section_html(section) for section in comparison.sections)
    return document(title, (f"{head}{exhibit_html(notes_text(comparison))}</header>", *sections))


def comparison_json(comparison: Comparison, releases: tuple[Judged, ...]) -> str:
    """Figures unrounded, what moved, and the tables."""
    record = {
        "schema": SCHEMA,
        "releases": [
            {
                "name": each.name,
                "verdict": each.report.title,
                "date": each.report.context.date,
                "artifact_digest": each.report.context.artifact_digest,
                "versions": dict(each.report.context.versions),
                "machine": dict(each.report.context.machine),
                "figures": {name: asdict(measured) for name, measured in figures_by_name(each.report).items()},
            }
            for each in releases
        ],
        "notes": comparison.notes,
        "changes": [asdict(change) for change in comparison.changes],
        "sections": list(_tables(comparison)),
    }
    return json.dumps(_plain(record), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _tables(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for section in comparison.sections:
        exhibits = [asdict(each) for each in section.exhibits]
        yield {"id": section.id, "title": section.title, "exhibits": exhibits}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
