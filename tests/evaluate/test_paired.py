"""Points lost on paired items: the value, the width, and what clusters do to it."""

import math

import numpy as np
import pytest
from scipy import stats

from quantpipe.errors import DataError
from quantpipe.evaluate.paired import exact_mcnemar_p, own_accuracy, paired_accuracy, paired_recovery
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
    with pytest.raises(DataError, match="a score is nan; scores are from 0 to 1"):
        paired_accuracy([1.0, math.nan], [1.0, 1.0], singletons(2))


def test_unpaired_test_and_wald_pass_or_miss_what_paired_intervals_do_not() -> None:
    """8 of 400 items lost and none gained: a real loss that a test of two separate samples does not see."""
    base, cand = outcomes(400, num_lost=8, num_gained=0)
    unpaired = stats.fisher_exact([[400 - 8, 8], [400, 0]])[1]
    base[:100] = [n < 8 for n in range(100)]  # the lost ones are right before, others wrong in both
    cand[:100] = [False] * 100
    two_samples = stats.chi2_contingency([[sum(base), 400 - sum(base)], [sum(cand), 400 - sum(cand)]])[1]
    assert two_samples > 0.3
    assert exact_mcnemar_p(8, 0) < 0.01 and unpaired < 0.05
    assert paired_accuracy(base, cand, singletons(400)).low > 0.5


@pytest.mark.parametrize(("num_lost", "num_gained"), [(0, 0), (1, 0), (5, 5), (9, 2), (40, 20), (300, 350)])
def test_mcnemar_is_scipys_exact_binomial_test(num_lost: int, num_gained: int) -> None:
    flips = num_lost + num_gained
    expected = stats.binomtest(num_lost, flips, 0.5).pvalue if flips else 1.0
    assert exact_mcnemar_p(num_lost, num_gained) == pytest.approx(expected)
    assert exact_mcnemar_p(num_gained, num_lost) == exact_mcnemar_p(num_lost, num_gained)


def test_scores_in_between_get_a_cluster_interval() -> None:
    rng = np.random.default_rng(12)
    base = rng.uniform(0.5, 1.0, size=300)
    cand = np.clip(base - rng.normal(0.02, 0.05, size=300), 0, 1)
    clusters = [f"c{n // 3}" for n in range(300)]
    result = paired_accuracy(base.tolist(), cand.tolist(), clusters)
    means = (base - cand).reshape(100, 3).mean(axis=1)
    expected = stats.t.interval(0.9, 99, loc=means.mean(), scale=stats.sem(means))
    assert (result.low, result.high) == pytest.approx((100 * expected[0], 100 * expected[1]))
    assert "cluster t interval" in result.detail


def test_scores_that_never_differ_leave_the_width_of_no_flip() -> None:
    scores = [0.5, 0.25] * 100
    same = paired_accuracy(scores, scores, singletons(200))
    no_flip = paired_accuracy([True] * 200, [True] * 200, singletons(200))
    assert (same.low, same.high) == pytest.approx((no_flip.low, no_flip.high))
    recovery = paired_recovery(scores, scores, singletons(200))
    assert recovery.value == 1.0 and recovery.low < 0.98


@pytest.mark.parametrize("num_clusters", [8, 20])
def test_false_passes_of_scores_in_few_clusters_stay_rare(num_clusters: int) -> None:
    """Losses are skewed and shared by a cluster; the upper end misses the true mean in about 5 % of draws."""
    rng = np.random.default_rng(9)
    clusters = np.repeat([f"c{i}" for i in range(num_clusters)], 5).tolist()
    misses = []
    for _ in range(600):
        loss = np.repeat(rng.beta(1.5, 12, size=num_clusters), 5)
        result = paired_accuracy([0.9] * len(loss), (0.9 - loss).tolist(), clusters)
        misses.append(result.high < 100 * 1.5 / 13.5)
    assert np.mean(misses) <= 0.08  # 5 %, skewness, and the noise of 600 draws


def test_recovery_is_the_share_that_is_left_with_an_interval() -> None:
    base, cand = outcomes(200, num_lost=9, num_gained=3)
    result = paired_recovery(base, cand, singletons(200))
    assert result.value == pytest.approx(np.mean(cand) / np.mean(base))
    assert (result.name, result.unit) == ("accuracy_recovery", "ratio")
    assert result.low < result.value < result.high
    nothing = paired_recovery([False] * 30, cand[:30], singletons(30))
    assert math.isnan(nothing.value)
    assert judge({"accuracy_recovery": Limit(min=0.9)}, [nothing]).verdict is Verdict.FAIL


def test_own_accuracy_is_wilsons_and_wider_for_clusters() -> None:
    right = [n % 4 != 0 for n in range(200)]
    result = own_accuracy(right, singletons(200))
    critical = float(stats.t.ppf(0.95, 199))
    expected = stats.binomtest(150, 200).proportion_ci(2 * stats.norm.cdf(critical) - 1, method="wilson")
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high))
    shared = own_accuracy(sorted(right), [f"c{n // 5}" for n in range(200)])
    assert shared.high - shared.low > 1.8 * (result.high - result.low)
