"""Folding keeps offsets; groups of digits are joined as far as one number may reach."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.calibration.redaction.scan import Scan, Span, layout, windows


def sizes(text: str) -> list[tuple[int, ...]]:
    return [tuple(group.num_digits for group in run) for run in Scan(text).runs]


def test_signs_of_full_width_and_other_digits_become_ascii() -> None:
    assert Scan("（＋８６）１３８　００１３－８０００＠").text == "(+86)138 0013-8000@"
    assert Scan("٤١١١ १२३ 𝟏𝟐").text == "4111 123 12"
    assert Scan("10–20—30 188·00").text == "10-20-30 188.00"


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="a1９\u200b\ufeff\u00adé中 -😀", max_size=40))
def test_a_span_is_located_where_its_characters_came_from(text: str) -> None:
    scan = Scan(text)
    visible = [i for i, char in enumerate(text) if char not in "\u200b\ufeff\u00ad"]
    assert len(scan.text) == len(visible)
    for at in range(len(scan.text)):
        assert scan.locate(Span(at, at + 1, "")) == Span(visible[at], visible[at] + 1, "")


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=60))
def test_lower_case_has_the_length_of_the_text(text: str) -> None:
    scan = Scan(text)
    assert len(scan.lower) == len(scan.text)


def test_groups_are_joined_over_separators_and_one_line_break_only() -> None:
    assert sizes("4111 1111\n1111-1111") == [(4, 4, 4, 4)]
    assert sizes("12, 34; 56") == [(2,), (2,), (2,)]
    assert sizes("12\n\n34") == [(2,), (2,)]
    assert sizes("no number") == []


def test_a_line_break_makes_one_group_of_two() -> None:
    (run,) = Scan("138 0013\n8000").runs
    assert layout(run) == (3, 8)


def test_windows_are_longest_first_and_bounded() -> None:
    (run,) = Scan("111 222 333 444").runs
    assert [len(groups) for groups in windows(run, 0, 6, 9)] == [3, 2]
    (long_run,) = Scan("1 " * 500).runs
    assert sum(1 for first in range(500) for _ in windows(long_run, first, 1, 19)) <= 500 * 7
