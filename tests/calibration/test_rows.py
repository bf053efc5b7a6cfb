"""Problems of rows: shown a few, counted all; names of fields that are safe to show."""

import pytest

from quantpipe.calibration.rows import (
    MOST_SHOWN,
    LimitReached,
    RowError,
    RowProblems,
    SourceReading,
    leave_out,
    shown_names,
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
    assert seen.dropped == {"bad row": 1299}


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


@pytest.mark.parametrize(
    "first_row",
    [["I am still waiting on my card?", "card_arrival"], ["Anna, secret"], ["13800138000", "x@example.com", "secret"]],
)
def test_a_row_of_data_in_the_place_of_names_is_not_shown(first_row: list[str]) -> None:
    assert shown_names(first_row) == ", ".join(f"(a name of {len(name)} characters)" for name in first_row)


def test_ordinary_names_are_shown_beside_an_odd_one() -> None:
    names = ["text", "Unit price (USD)", "客户编号", "What did the customer say on the phone?"]
    assert shown_names(names) == "text, Unit price (USD), 客户编号, (a name of 39 characters)"


def test_only_so_many_names_are_shown() -> None:
    assert shown_names([]) == "none"
    assert shown_names([f"c{i}" for i in range(23)]).endswith("c19, ... 3 more")
