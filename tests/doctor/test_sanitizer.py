"""What compute-sanitizer says, read from a program that stands in for it."""

from pathlib import Path

import pytest

from quantpipe.doctor import sanitizer
from quantpipe.doctor.parts import AbsentError


def stand_in(folder: Path, text: str) -> str:
    program = folder / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("text", "found", "is_right"),
    [
        ("========= ERROR SUMMARY: 0 errors", "0 errors", True),
        ("========= ERROR SUMMARY: 3 errors", "3 errors", False),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", "2 errors", False),
        ("nothing", "no summary; it ended with 0", None),
    ],
)
def test_summary_is_read(tmp_path: Path, text: str, found: str, is_right: bool | None) -> None:
    row = sanitizer.sanitizer_row(stand_in(tmp_path, text), "memcheck")
    assert row == {"tool": "memcheck", "found": found, "ok": is_right}


def test_absent_tool_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sanitizer, "_USUAL", Path("/nowhere"))
    with pytest.raises(AbsentError, match="not present"):
        list(sanitizer.sanitizer_rows())
