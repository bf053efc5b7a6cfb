"""The five files are written together, and the same number stands in all of them."""

import json
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
from reports import a_report

from quantpipe.gate.record import GATE_NAME, REPORT_NAMES, withdraw_verdict
from quantpipe.gate.report import interval
from quantpipe.reporting.contents import sections_of, value_with_unit
from quantpipe.reporting.exhibits import Bars, Curves, Intervals, Panels, Table
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.tables import table_behind
from quantpipe.reporting.writing import write_report


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    write_report(tmp_path, a_report())
    assert {path.name for path in tmp_path.iterdir()} == set(REPORT_NAMES)
    return {name: (tmp_path / name).read_text(encoding="utf-8") for name in REPORT_NAMES}


def text_of_html(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", html))


def test_every_check_stands_in_all_five_with_the_same_figures(files: dict[str, str]) -> None:
    junit = " ".join(str(each.text) + str(each.attrib) for each in ElementTree.fromstring(files["junit.xml"]).iter())
    texts = {**files, "junit.xml": junit, "report.html": text_of_html(files["report.html"])}
    del texts["report.json"]
    record = json.loads(files["report.json"])
    for check, stored in zip(a_report().checks, record["checks"], strict=True):
        measured = check.measurement
        assert measured is not None
        for name, text in texts.items():
            for figure in (check.metric, check.limit, value_with_unit(measured), interval(measured), check.reason):
                assert figure in text, f"{figure} is not in {name}"
        assert stored["measurement"]["value"] == measured.value
        assert (stored["measurement"]["low"], stored["measurement"]["high"]) == (measured.low, measured.high)


def test_every_number_of_every_exhibit_stands_in_html_markdown_and_json(files: dict[str, str]) -> None:
    html, markdown, record = text_of_html(files["report.html"]), files["report.md"], files["report.json"]
    given = {section.id for section in a_report().sections}
    num_checked = 0
    for section in sections_of(a_report()):
        for exhibit in section.exhibits:
            table = table_behind(exhibit) if isinstance(exhibit, Bars | Panels | Curves | Intervals) else exhibit
            if not isinstance(table, Table):
                continue
            for row in table.rows:
                for cell, column in zip(row, table.columns, strict=True):
                    if isinstance(cell, float) and cell == cell:
                        text = shown(cell, column.form)
                        assert text in html and text in markdown, f"{section.id}: {text}"
                        assert section.id not in given or isinstance(exhibit, Intervals) or json.dumps(cell) in record
                        num_checked += 1
    assert num_checked > 50


def test_all_of_it_is_withdrawn_with_the_verdict(tmp_path: Path) -> None:
    write_report(tmp_path, a_report())
    (tmp_path / GATE_NAME).write_text("{}")
    withdraw_verdict(tmp_path)
    assert list(tmp_path.iterdir()) == []
