"""The file of a GPU check: what is damaged is named and runs again, what is none of ours is left alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantpipe.doctor.record import PartResult, Record
from quantpipe.errors import DataError

IDENTITY = {"device": "a GPU", "torch": "2"}
RIGHT: dict[str, Any] = {"state": "passed", "seconds": 1.5, "reason": "", "rows": [{"ok": True, "n": 1}]}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"identity": 1}', '{"identity": {"device": "a GPU", "torch": "2"}, "parts": 1}']
)
def test_a_file_that_is_no_record_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "check.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"check.json: no record of a GPU check; remove it"):
        Record(path, IDENTITY)


@pytest.mark.parametrize(
    ("damaged", "fault"),
    [
        (None, "found null, and a mapping is expected"),
        ([], "found a list, and a mapping is expected"),
        (RIGHT | {"colour": 1}, "unknown key 'colour'"),
        ({"state": "passed"}, "reason is missing"),
        (RIGHT | {"state": "pased"}, "state: found 'pased', and passed, failed, stopped, absent are known"),
        (RIGHT | {"state": ["passed"]}, "state: found ['passed'], and"),
        (RIGHT | {"seconds": "1"}, "seconds: '1' is no time"),
        (RIGHT | {"seconds": -1}, "seconds: -1 is no time"),
        (RIGHT | {"seconds": True}, "seconds: True is no time"),
        (RIGHT | {"reason": 3}, "reason: found a number, and text is expected"),
        (RIGHT | {"rows": {}}, "rows: found a mapping, and a list is expected"),
        (RIGHT | {"rows": [{"ok": True}, 7]}, "rows[1]: found a number, and a mapping is expected"),
        (RIGHT | {"rows": [{"n": []}]}, "rows[0].n: found a list, and a single value is expected"),
        (RIGHT | {"rows": [{"ok": "yes"}]}, "rows[0].ok: found text, and true, false or null is expected"),
        (RIGHT | {"rows": []}, "passed, yet it holds no rows"),
        (RIGHT | {"rows": [{"ok": False}]}, "passed, yet some of its rows are wrong"),
    ],
)
def test_a_damaged_part_is_named_and_counts_as_not_run(tmp_path: Path, damaged: object, fault: str) -> None:
    path = tmp_path / "check.json"
    path.write_text(json.dumps({"identity": IDENTITY, "parts": {"a": RIGHT, "b": damaged}}))
    record = Record(path, IDENTITY)
    assert record.is_done("a")
    assert not record.is_done("b")
    [note] = record.notes
    assert note.startswith(f"{path}: part 'b': {fault}")
    assert note.endswith("; it counts as not run, and runs again")
    assert "\n" not in note


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    for state in ("failed", "stopped", "absent"):
        Record(path, IDENTITY).put(state, PartResult(state, 0.0, "why", []))
    record = Record(path, IDENTITY)
    assert (record.parts.keys(), record.notes) == ({"failed", "stopped", "absent"}, [])


def test_results_of_another_machine_are_replaced_and_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    Record(path, IDENTITY).put("a", PartResult("passed", 1.0, "", [{"ok": True}]))
    record = Record(path, IDENTITY | {"device": "another"})
    assert (record.parts, record.notes) == (
        {},
        [f"{path}: holds what another machine or version found; it is replaced"],
    )
