"""Problems of rows: shown a few, counted all."""

import pytest

from quantpipe.calibration.rows import (
    MOST_SHOWN,
    LimitReached,
    RowError,
    RowProblems,
    SourceReading,
    leave_out,
)
from quantpipe.errors import DataError


def test_many_bad_rows_show_the_first_and_count_the_rest() -> None:
    problems, seen = RowProblems(), SourceReading()
    for number in range(1, 1_300):
        leave_out(f"rows.jsonl:{number}", RowError("bad"), problems, seen)
    with pytest.raises(DataError) as caught:
        problems.raise_if_any()
    lines = str(caught.value).splitlines()
    assert lines[0] == "rows.jsonl:1: bad"
    assert len(lines) == MOST_SHOWN + 1
    assert lines[-1] == "... and 1,289 more rows like these"
    assert seen.dropped == seen.bad == {"bad row": 1299}


def test_bad_rows_that_are_dropped_are_only_counted() -> None:
    problems = RowProblems(is_dropping=True)
    problems.add("rows.jsonl:1", "bad")
    problems.raise_if_any()
    assert problems.num_rows == 1


def test_rows_are_counted_up_to_the_limit() -> None:
    seen = SourceReading(limit=2)
    seen.start_row(4)
    seen.start_row(7)
    with pytest.raises(LimitReached):
        seen.start_row(9)
    assert (seen.num_rows, seen.last_row) == (2, 7)
