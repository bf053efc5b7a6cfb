"""Places on an axis, and the round values that are marked there."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from quantpipe.reporting.plots.scale import Scale, scale_of, ticks

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


@given(values=st.lists(FINITE, min_size=1, max_size=8), from_zero=st.booleans())
def test_every_value_has_its_place_within_the_axis(values: list[float], from_zero: bool) -> None:
    scale = scale_of(values, 10.0, 110.0, from_zero)
    for value in values:
        assert 10.0 <= scale.place(value) <= 110.0
        assert scale.low <= value <= scale.high
    if from_zero:
        assert scale.low <= 0.0 <= scale.high


@given(values=st.lists(FINITE, min_size=1, max_size=8), num_most=st.integers(2, 8))
def test_marks_are_few_within_the_axis_and_evenly_apart(values: list[float], num_most: int) -> None:
    scale = scale_of(values, 0.0, 100.0)
    marks = ticks(scale, num_most)
    assert len(marks) <= num_most
    slack = 1e-6 * (abs(scale.high) + abs(scale.low))
    assert all(scale.low - slack <= mark <= scale.high + slack for mark in marks)
    steps = [after - before for before, after in itertools.pairwise(marks)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-6, abs_tol=slack) for step in steps)


def test_marks_are_round() -> None:
    assert ticks(Scale(0.0, 1.0, 0, 1), 6) == [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert ticks(Scale(0.0, 97.0, 0, 1), 5) == [0.0, 20.0, 40.0, 60.0, 80.0]


def test_what_lies_beyond_or_is_no_number_stays_on_the_edge() -> None:
    scale = scale_of([1.0, 2.0, math.inf, math.nan], 0.0, 100.0)
    assert scale.place(math.inf) == 100.0
    assert scale.place(-math.inf) == 0.0
    assert scale.place(math.nan) == 0.0


def test_a_logarithmic_axis_has_equal_factors_equally_far_apart() -> None:
    scale = Scale(1.0, 64.0, 0.0, 60.0, is_log=True)
    assert [round(scale.place(value), 9) for value in (1.0, 2.0, 8.0, 64.0)] == [0.0, 10.0, 30.0, 60.0]
    assert scale.place(0.0) == 0.0
