from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from quantpipe.calibration.definition.set_definition import load_set
from quantpipe.calibration.views.overview import overview
from quantpipe.cli_traceback import may_quote_rows, one_line, traceback_text
from quantpipe.errors import DataError

SECRET = "jo@example.com"


def caught(tmp_path: Path, error: Exception) -> Exception:
    """An error as it is after it went through the code that reads rows."""

    def progress(items: Iterable[object], total: int, label: str) -> Iterator[object]:
        raise error

    (tmp_path / "set.yaml").write_text("version: 1\nname: a\nsources: [{path: a.txt}]\n")
    with pytest.raises(type(error)) as found:
        overview(load_set(tmp_path), progress=progress)  # type: ignore[arg-type]
    return found.value


def test_the_text_of_an_unforeseen_error_among_rows_is_withheld(tmp_path: Path) -> None:
    error = caught(tmp_path, ValueError(f"invalid literal: '{SECRET}'"))
    assert may_quote_rows(error)
    assert one_line(error).startswith("ValueError at test_cli_traceback.py:")
    shown = traceback_text(error)
    assert SECRET not in one_line(error) + shown
    assert "survey.py" in shown and shown.endswith("\nValueError\n")


def test_what_led_to_an_error_is_withheld_too_and_the_error_itself_is_printed_elsewhere(tmp_path: Path) -> None:
    error = caught(tmp_path, DataError("rows.csv:3: is empty"))
    inner = caught(tmp_path, KeyError(SECRET))
    error.__cause__ = inner
    shown = traceback_text(error)
    assert SECRET not in shown
    assert shown.index("KeyError (its text") < shown.rindex("\nDataError\n")
    assert "is empty" not in shown
    assert not may_quote_rows(error)


def test_other_errors_are_shown_as_python_shows_them() -> None:
    try:
        int("x")
    except ValueError as error:
        assert one_line(error) == "ValueError: invalid literal for int() with base 10: 'x'"
        assert traceback_text(error).startswith("Traceback (most recent call last):\n")
        assert traceback_text(error).endswith("\nValueError\n")
        assert "invalid literal" not in traceback_text(error)
