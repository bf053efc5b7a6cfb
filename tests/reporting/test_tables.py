"""Behind every plot stands a table with all of its numbers."""

from reports import a_report

from quantpipe.reporting.contents import sections_of
from quantpipe.reporting.exhibits import Bar, Bars, Curve, Curves, Interval, Intervals, Panel, Panels, Point
from quantpipe.reporting.tables import table_behind


def test_bars_have_a_row_for_each_label_and_a_column_for_each_series() -> None:
    table = table_behind(Bars("N", "task", ("a", "b"), (Bar("x", (1.0, None)),), "items"))
    assert [column.name for column in table.columns] == ["task", "a, items", "b, items"]
    assert table.rows == (("x", 1.0, None),)


def test_panels_have_a_row_for_each_position() -> None:
    table = table_behind(Panels("N", "linear", "block", ("before", "after"), (Panel("q", (0, 1), ((1, 2), (3, 4))),)))
    assert table.rows == (("q", 0, 1, 3), ("q", 1, 2, 4))


def test_curves_have_ends_only_where_a_point_has_them() -> None:
    plain = table_behind(Curves("N", "x", "y", (Curve("a", (Point(1, 2),)),)))
    assert plain.rows == (("a", 1, 2),)
    named = table_behind(Curves("N", "x", "y", (Curve("a", (Point(0, 2, 1, 3),)),), x_labels=("first",)))
    assert named.rows == (("a", "first", 2, 1, 3),)


def test_intervals_have_value_ends_and_samples() -> None:
    table = table_behind(Intervals("N", "slice", "nats", (Interval("de", 1, 0, 2, 9),), 0.9))
    assert table.rows == (("de", 1, 0, 2, 9),)


def test_all_rows_are_as_long_as_their_headings() -> None:
    for section in sections_of(a_report()):
        for exhibit in section.exhibits:
            if isinstance(exhibit, Bars | Panels | Curves | Intervals):
                table = table_behind(exhibit)
                assert table.rows
                assert {len(row) for row in table.rows} == {len(table.columns)}
