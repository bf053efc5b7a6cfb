"""report.json holds every number unrounded, reads back equal, and its schema is the committed one."""

import json
import math
from pathlib import Path

import pytest
from reports import a_report

from quantpipe.errors import DataError
from quantpipe.reporting.json_form import read_json, render_json, report_schema

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "report.schema.json"


def test_a_report_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(render_json(a_report()), encoding="utf-8")
    again = read_json(path)
    assert render_json(again) == path.read_text(encoding="utf-8")
    assert again.checks == a_report().checks
    assert [section.id for section in again.sections] == [section.id for section in a_report().sections]


def test_numbers_that_are_not_finite_are_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(render_json(a_report()), parse_constant=refuse)
    [p99] = [each for each in record["measurements"] if each["name"] == "p99_kl"]
    assert (p99["low"], p99["high"]) == ("-inf", "inf")
    (tmp_path / "report.json").write_text(json.dumps(record))
    assert read_json(tmp_path / "report.json").measurements[0].low == -math.inf


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda record: record | {"schema": "quantpipe.report/9"}, "its schema is not"),
        (lambda record: record | {"surprise": 1}, "surprise"),
        (lambda record: {key: value for key, value in record.items() if key != "summary"}, "summary"),
        (lambda record: record | {"verdict": "MAYBE"}, "verdict"),
    ],
)
def test_a_damaged_report_is_refused_in_one_line(tmp_path: Path, damage, named: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(damage(json.loads(render_json(a_report())))))
    with pytest.raises(DataError, match=named) as error:
        read_json(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_or_cut_report_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_json(tmp_path / "report.json")
    (tmp_path / "report.json").write_text(render_json(a_report())[:500])
    with pytest.raises(DataError, match="not a report"):
        read_json(tmp_path / "report.json")


def test_the_committed_schema_is_that_of_the_code() -> None:
    again = "print(json.dumps(report_schema(), indent=1))"
    assert json.loads(SCHEMA_FILE.read_text()) == report_schema(), f"write docs/report.schema.json anew: {again}"
