"""Parts of a GPU check: budgets, failures, and what is kept."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantpipe.doctor.cases.case import Case
from quantpipe.doctor.kernel_rows import kernel_rows
from quantpipe.doctor.parts import PARTS, AbsentError, Part, run_part, run_parts
from quantpipe.doctor.record import PartResult, Record, Row

CPU, GPU = torch.device("cpu"), torch.device("cuda")
IDENTITY = {"device": "a GPU", "torch": "2"}


def part(rows: Callable[[torch.device], Iterator[Row]], name: str = "own", budget_s: float = 60.0) -> Part:
    return Part(name, "Own", budget_s, "nothing", rows)


def right(device: torch.device) -> Iterator[Row]:
    yield {"ok": True}
    yield {"ok": None}


def test_a_wrong_row_fails_the_part() -> None:
    def wrong(device: torch.device) -> Iterator[Row]:
        yield {"ok": True}
        yield {"ok": False}

    assert run_part(part(right), CPU).state == "passed"
    failed = run_part(part(wrong), CPU)
    assert (failed.state, failed.reason, len(failed.rows)) == ("failed", "1 rows are wrong", 2)


def test_a_part_that_gives_no_row_did_not_pass() -> None:
    def nothing(device: torch.device) -> Iterator[Row]:
        yield from ()

    assert (run_part(part(nothing), CPU).state, run_part(part(nothing), CPU).reason[:15]) == (
        "failed",
        "it gave no row,",
    )


def test_rows_before_a_failure_are_kept() -> None:
    def breaks(device: torch.device) -> Iterator[Row]:
        yield {"n": 1}
        raise RuntimeError("CUDA error:\nan illegal memory access")

    result = run_part(part(breaks), CPU)
    assert (result.state, result.rows) == ("failed", [{"n": 1}])
    assert result.reason == "RuntimeError: CUDA error: an illegal memory access"


def test_a_part_ends_when_its_time_is_spent() -> None:
    result = run_part(part(right, budget_s=0.0), GPU)
    assert (result.state, len(result.rows)) == ("stopped", 1)
    assert result.reason == "its 0 s were spent after 1 rows; run it alone with --only"
    assert run_part(part(right, budget_s=0.0), CPU).state == "passed"  # interpreted: as slow as the machine is


def test_a_wrong_row_fails_a_part_whose_time_is_spent() -> None:
    def wrong(device: torch.device) -> Iterator[Row]:
        yield {"ok": False}

    assert run_part(part(wrong, budget_s=0.0), GPU).state == "failed"


def test_what_is_absent_is_said() -> None:
    def lacks(device: torch.device) -> Iterator[Row]:
        raise AbsentError("the tool is not present")
        yield {}

    assert run_part(part(lacks), CPU) == PartResult(
        "absent", reason="the tool is not present", seconds=pytest.approx(0, abs=9)
    )


def test_budgets_add_up_to_less_than_eight_minutes() -> None:
    assert sum(part.budget_s for part in PARTS.values()) < 480


def test_parts_that_passed_are_not_run_again_and_others_are(tmp_path: Path) -> None:
    runs: list[str] = []

    def noting(name: str, is_right: bool) -> Part:
        def rows(device: torch.device) -> Iterator[Row]:
            runs.append(name)
            yield {"ok": is_right}

        return part(rows, name)

    parts, path = [noting("a", True), noting("b", False)], tmp_path / "check.json"
    told: list[str] = []
    assert not run_parts(parts, CPU, Record(path, IDENTITY), lambda part, result: told.append(result.state))
    assert not run_parts(parts, CPU, Record(path, IDENTITY), lambda part, result: told.append(result.state))
    assert runs == ["a", "b", "b"]
    assert told == ["passed", "failed"] * 2
    Record(path, IDENTITY | {"torch": "3"}).put("c", PartResult("passed"))
    assert json.loads(path.read_text())["parts"].keys() == {"c"}


def test_a_case_that_raises_is_wrong_and_the_next_one_runs() -> None:
    def breaks(device: torch.device) -> float:
        raise RuntimeError("out of resource")

    cases = [
        Case("k", torch.float16, "a", breaks),
        Case("k", torch.float16, "b", lambda device: 0.5),
        Case("k", torch.float16, "c", lambda device: float("nan")),
        Case("k", torch.float16, "d", lambda device: 1.1),
    ]
    rows = list(kernel_rows(cases, CPU))
    assert [row["ok"] for row in rows] == [False, True, False, False]
    assert rows[0]["raised"] == "RuntimeError: out of resource"
