"""Points lost on paired items: the value, the width, and what clusters do to it."""

import numpy as np
import pytest

from quantpipe.errors import DataError
from quantpipe.evaluate.paired import paired_accuracy
from quantpipe.gate.judge import Verdict, judge
from quantpipe.gate.limits import Limit


def outcomes(num_items: int, num_lost: int, num_gained: int) -> tuple[list[bool], list[bool]]:
    """The first items are lost, the next gained, the rest right in both."""
    base = [not num_lost <= i < num_lost + num_gained for i in range(num_items)]
    cand = [i >= num_lost for i in range(num_items)]
    return base, cand


def singletons(num_items: int) -> list[str]:
    return [f"c{i}" for i in range(num_items)]


def test_value_is_the_difference_of_the_shares_in_points() -> None:
    base, cand = outcomes(200, num_lost=9, num_gained=3)
    result = paired_accuracy(base, cand, singletons(200))
    assert result.value == pytest.approx(100 * (np.mean(base) - np.mean(cand)))
    assert result.value == pytest.approx(3.0)
    assert (result.name, result.unit, result.num_samples, result.confidence) == (
        "accuracy_loss_points",
        "points",
        200,
        0.90,
    )
    assert result.low < 3.0 < result.high


def test_zero_flips_leave_an_interval_around_zero() -> None:
    base, cand = outcomes(180, 0, 0)
    result = paired_accuracy(base, cand, singletons(180))
    assert result.value == 0.0
    assert 1.0 < result.high < 2.0
    assert result.low == pytest.approx(-result.high)


def test_zero_flips_on_few_items_cannot_pass_a_tight_limit() -> None:
    base, cand = outcomes(20, 0, 0)
    result = paired_accuracy(base, cand, singletons(20))
    assert judge({"accuracy_loss_points": Limit(max=5.0)}, [result]).verdict is Verdict.UNSURE


def test_six_flips_of_one_template_weigh_less_than_six_separate_ones() -> None:
    """Six lost items that share a template are one observation: the interval is wider than for six of their own."""
    base, cand = outcomes(180, num_lost=6, num_gained=0)
    apart = paired_accuracy(base, cand, singletons(180))
    together = paired_accuracy(base, cand, ["same"] * 6 + singletons(174))
    assert together.value == apart.value
    assert together.high - together.low > 1.5 * (apart.high - apart.low)


def test_nearly_all_singletons_agree_with_all_singletons() -> None:
    base, cand = outcomes(180, num_lost=8, num_gained=4)
    clusters = singletons(180)
    clusters[100:104] = ["pair a", "pair a", "pair b", "pair b"]
    apart, nearly = paired_accuracy(base, cand, singletons(180)), paired_accuracy(base, cand, clusters)
    assert nearly.low == pytest.approx(apart.low, abs=0.05)
    assert nearly.high == pytest.approx(apart.high, abs=0.05)


@pytest.mark.parametrize("flip_frac", [0.0, 0.02, 0.06])
def test_false_passes_stay_rare_where_clusters_flip_together(flip_frac: float) -> None:
    """60 clusters of 3 items that are lost as one: the upper end misses the true loss in at most about 5 % of draws."""
    rng = np.random.default_rng(3)
    clusters = np.repeat([f"c{i}" for i in range(60)], 3).tolist()
    misses = []
    for _ in range(400):
        lost = np.repeat(rng.random(60) < flip_frac, 3)
        result = paired_accuracy([True] * 180, (~lost).tolist(), clusters)
        misses.append(result.high < 100 * flip_frac)
    assert np.mean(misses) <= 0.07  # 5 % and the noise of 400 draws


def test_sides_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(DataError, match="3 baseline items, 2 candidate items and 3 cluster names"):
        paired_accuracy([True] * 3, [True] * 2, singletons(3))
    with pytest.raises(DataError, match="1 independent clusters"):
        paired_accuracy([True] * 3, [True] * 3, ["same"] * 3)
