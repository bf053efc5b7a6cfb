import math

import numpy as np
import pytest

from quantpipe.errors import DataError
from quantpipe.evaluate.seed_spread import compare_seeds


def test_sets_whose_figures_are_far_apart_differ_and_the_lower_one_is_better() -> None:
    _, (found,) = compare_seeds({"banking": {"generic": (0.20, 0.21, 0.19), "tickets": (0.10, 0.105, 0.095)}})
    assert found.differs and found.verdict == "differs"
    assert found.better == "tickets"
    assert found.mean == pytest.approx(0.1)


def test_a_difference_within_the_spread_is_not_shown() -> None:
    _, (found,) = compare_seeds({"banking": {"a": (0.20, 0.10, 0.15), "b": (0.12, 0.19, 0.16)}})
    assert not found.differs and found.better is None
    assert found.verdict == "not shown to differ"
    assert found.low < 0 < found.high


def test_interval_is_students_t_of_the_paired_differences() -> None:
    # differences 0.01, 0.02, 0.03: mean 0.02, sd 0.01, t(2, 0.975) = 4.302653, half width 4.302653 * 0.01 / sqrt(3)
    _, (found,) = compare_seeds({"x": {"a": (0.11, 0.22, 0.33), "b": (0.10, 0.20, 0.30)}})
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.02 - half, 0.02 + half), abs=1e-7)


def test_a_shift_common_to_a_seed_does_not_hide_a_difference() -> None:
    a = (0.10, 0.50, 0.90)
    _, (found,) = compare_seeds({"x": {"a": a, "b": (0.110, 0.511, 0.912)}})
    assert found.better == "a"


def test_wrong_findings_are_as_rare_as_the_confidence_says() -> None:
    """Both sets drawn alike: over 2,000 tries, 5 % may be said to differ, within 4 standard errors (0.5 %)."""
    generator = np.random.default_rng(0)
    draws = generator.normal(1.0, 0.1, (2000, 2, 3))
    values = {str(i): {"a": tuple(draw[0]), "b": tuple(draw[1])} for i, draw in enumerate(draws)}
    _, differences = compare_seeds(values)
    assert np.mean([each.differs for each in differences]) == pytest.approx(0.05, abs=0.02)


def test_every_pair_of_three_sets_is_compared_on_every_domain() -> None:
    values = {domain: {name: (1.0, 1.1) for name in "abc"} for domain in ("x", "y")}
    spreads, differences = compare_seeds(values)
    assert [(each.domain, each.first, each.second) for each in differences[:3]] == [
        ("x", "a", "b"),
        ("x", "a", "c"),
        ("x", "b", "c"),
    ]
    assert len(differences) == 6 and len(spreads) == 6
    assert not any(each.differs for each in differences)


def test_spread_over_seeds_is_the_sample_standard_deviation() -> None:
    (spread,), _ = compare_seeds({"x": {"a": (1.0, 2.0, 3.0)}})
    assert (spread.mean, spread.deviation) == (2.0, 1.0)


def test_figures_that_no_seed_moves_differ_only_where_they_are_unequal() -> None:
    _, (same,) = compare_seeds({"x": {"a": (0.1, 0.1), "b": (0.1, 0.1)}})
    _, (apart,) = compare_seeds({"x": {"a": (0.1, 0.1), "b": (0.2, 0.2)}})
    assert not same.differs
    assert apart.better == "a"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": (1.0,), "b": (2.0,)}, "1 seed leaves no spread"),
        ({"a": (1.0, 2.0), "b": (2.0, 1.0, 3.0)}, r"\[2, 3\] seeds; every set needs the same"),
        ({"a": (1.0, math.nan), "b": (2.0, 1.0)}, "a has a figure that is not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(values: dict[str, tuple[float, ...]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare_seeds({"x": values})
