"""What compute-sanitizer says, read from a program that stands in for it."""

from pathlib import Path

import pytest

from quantpipe.doctor import sanitizer
from quantpipe.doctor.parts import AbsentError


def stand_in(folder: Path, text: str, then: str = "") -> str:
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '{text}'\n{then}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("text", "found", "is_right"),
    [
        ("========= ERROR SUMMARY: 0 errors", "0 errors", True),
        ("========= ERROR SUMMARY: 3 errors", "3 errors", False),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", "2 errors", False),
        ("nothing", "no summary; it ended with 0, 0 errors until then", None),
    ],
)
def test_summary_is_read(tmp_path: Path, text: str, found: str, is_right: bool | None) -> None:
    row = sanitizer.sanitizer_row(stand_in(tmp_path, text), "memcheck")
    assert row == {"tool": "memcheck", "found": found, "ok": is_right}


@pytest.mark.parametrize(
    ("text", "num_errors", "is_right"), [("========= Invalid __global__ read", 1, False), ("", 0, None)]
)
def test_what_was_found_counts_where_time_is_too_short(
    tmp_path: Path, text: str, num_errors: int, is_right: bool | None
) -> None:
    row = sanitizer.sanitizer_row(stand_in(tmp_path, text, "sleep 600"), "memcheck", timeout_s=1.0)
    assert row["found"] == f"not finished within 1 s, {num_errors} errors until then"
    assert row["ok"] is is_right


def test_absent_tool_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitizer, "_USUAL", Path("/nowhere"))
    with pytest.raises(AbsentError, match="not present"):
        list(sanitizer.sanitizer_rows())
