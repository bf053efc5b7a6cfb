"""What people read of a GPU check."""

import io

from rich.console import Console

from quantpipe.doctor.facts import Fact
from quantpipe.doctor.record import PartResult, Row
from quantpipe.doctor.tables import fact_lines, show_part


def shown(result: PartResult) -> str:
    text = io.StringIO()
    show_part(Console(file=text, width=200), "Kernels", result)
    return text.getvalue()


def test_marks_say_what_is_wrong() -> None:
    lines = fact_lines([Fact("a", "1"), Fact("b", "2", "note"), Fact("c", "3", "fault")])
    assert list(lines) == ["ok  a: 1", "--  b: 2", "!!  c: 3"]


def test_of_many_cases_those_that_are_wrong_are_shown() -> None:
    rows: list[Row] = [{"kernel": f"k{index}", "error": 0.5, "ok": True} for index in range(20)]
    rows[7] = {"kernel": "k[7]", "error": 3.0, "ok": False}
    text = shown(PartResult("failed", 1.25, "1 rows are wrong", rows))
    assert text.startswith("Kernels: failed in 1.2 s: 1 rows are wrong\n19 of 20 cases are right\n")
    assert "k[7]" in text
    assert "NO" in text
    assert "k8" not in text


def test_a_part_that_did_not_run_says_why() -> None:
    assert shown(PartResult("absent", reason="needs [a] GPU")) == "Kernels: not run: needs [a] GPU\n"


def test_every_row_of_times_is_shown_with_all_columns() -> None:
    text = shown(PartResult("passed", 0.0, "", [{"us": 1.23456, "what": "x"}, {"found": "does not fit"}]))
    assert all(part in text for part in ("us", "what", "found", "1.235", "does not fit"))
