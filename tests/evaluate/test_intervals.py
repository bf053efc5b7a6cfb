"""Intervals against independent computations, exact coverage and known values."""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from quantpipe.evaluate.intervals import design_effect, t_interval, t_quantile, tango_interval, wilson_interval

Z = float(stats.norm.ppf(0.95))
NUM_ITEMS = 180
MAX_FLIPS = 45  # 45 lost or gained of 180 has a probability below 1e-7 at the flip rates tested


def wald_interval(num_lost: int, num_gained: int, num_items: int) -> tuple[float, float]:
    difference = (num_lost - num_gained) / num_items
    half = Z * math.sqrt(num_lost + num_gained - (num_lost - num_gained) ** 2 / num_items) / num_items
    return difference - half, difference + half


def score_by_maximising(num_lost: int, num_gained: int, num_items: int, difference: float) -> float:
    """Tango's statistic with the restricted likelihood maximised numerically instead of in closed form."""

    def unlikelihood(gained_frac: float) -> float:
        lost_frac = gained_frac + difference
        rest = num_items - num_lost - num_gained
        return -float(
            special.xlogy(num_lost, lost_frac)
            + special.xlogy(num_gained, gained_frac)
            + special.xlogy(rest, 1 - lost_frac - gained_frac)
        )

    bounds = (max(0.0, -difference) + 1e-12, (1 - difference) / 2 - 1e-12)
    gained_frac = optimize.minimize_scalar(unlikelihood, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = num_items * (2 * gained_frac + difference * (1 - difference))
    return (num_lost - num_gained - num_items * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("num_lost", "num_gained"), [(9, 2), (3, 3), (1, 6), (20, 11)])
def test_tango_ends_are_where_the_numerically_maximised_score_test_stops_rejecting(
    num_lost: int, num_gained: int
) -> None:
    low, high = tango_interval(num_lost, num_gained, NUM_ITEMS, Z)
    assert score_by_maximising(num_lost, num_gained, NUM_ITEMS, low) == pytest.approx(Z, abs=1e-3)
    assert score_by_maximising(num_lost, num_gained, NUM_ITEMS, high) == pytest.approx(-Z, abs=1e-3)


def test_no_flips_still_leave_a_width_of_the_known_form() -> None:
    low, high = tango_interval(0, 0, NUM_ITEMS, Z)
    assert high == pytest.approx(Z**2 / (NUM_ITEMS + Z**2), rel=1e-6)
    assert low == pytest.approx(-high, rel=1e-6)
    assert wald_interval(0, 0, NUM_ITEMS) == (0.0, 0.0)


def test_swapping_the_models_mirrors_the_interval() -> None:
    low, high = tango_interval(7, 2, NUM_ITEMS, Z)
    assert tango_interval(2, 7, NUM_ITEMS, Z) == pytest.approx((-high, -low), abs=1e-9)


def test_all_items_lost_reaches_one_and_stays_inside() -> None:
    low, high = tango_interval(10, 0, 10, Z)
    assert 0.5 < low < 1
    assert high == pytest.approx(1.0, abs=1e-6)


def outcome_probabilities(lost_frac: float, gained_frac: float) -> np.ndarray:
    """Multinomial probability of every (lost, gained) up to MAX_FLIPS each."""
    lost, gained = np.meshgrid(np.arange(MAX_FLIPS), np.arange(MAX_FLIPS), indexing="ij")
    rest = NUM_ITEMS - lost - gained
    log_ways = special.gammaln(NUM_ITEMS + 1) - sum(special.gammaln(k + 1) for k in (lost, gained, rest))
    log_chance = special.xlogy(lost, lost_frac) + special.xlogy(gained, gained_frac)
    return np.exp(log_ways + log_chance + special.xlogy(rest, 1 - lost_frac - gained_frac))


@pytest.fixture(scope="module")
def tango_table() -> np.ndarray:
    return np.array([[tango_interval(b, c, NUM_ITEMS, Z) for c in range(MAX_FLIPS)] for b in range(MAX_FLIPS)])


@pytest.mark.parametrize("flip_frac", [0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.10])
@pytest.mark.parametrize("lost_share", [0.5, 0.7, 1.0])
def test_tango_covers_the_true_loss_at_small_flip_rates(
    tango_table: np.ndarray, flip_frac: float, lost_share: float
) -> None:
    """Exact coverage by summing over all outcomes of 180 items; a false pass is a true loss above the upper end."""
    lost_frac, gained_frac = flip_frac * lost_share, flip_frac * (1 - lost_share)
    chance = outcome_probabilities(lost_frac, gained_frac)
    loss = lost_frac - gained_frac
    above = float(chance[loss > tango_table[:, :, 1] + 1e-12].sum())
    below = float(chance[loss < tango_table[:, :, 0] - 1e-12].sum())
    assert chance.sum() == pytest.approx(1.0, abs=1e-6)
    assert above <= 0.055  # nominal 0.05; the counts are discrete
    assert 1 - above - below >= 0.875  # nominal 0.90


def test_wald_would_pass_what_tango_does_not() -> None:
    """Why not Wald: at 1 % lost items its upper end is too low three times as often as allowed."""
    chance = outcome_probabilities(0.01, 0.0)
    upper = np.array([[wald_interval(b, c, NUM_ITEMS)[1] for c in range(MAX_FLIPS)] for b in range(MAX_FLIPS)])
    assert float(chance[upper < 0.01].sum()) > 0.15


def test_singletons_have_no_design_effect() -> None:
    values = np.array([0.0, 1.0, 0.0, -1.0, 0.0, 1.0])
    assert design_effect(values, np.arange(6), pull=1.0) == pytest.approx(1.0)


def test_identical_items_of_a_cluster_count_as_one() -> None:
    values = np.repeat([1.0, 0.0, 0.0, -1.0] * 10, 3)
    assert design_effect(values, np.repeat(np.arange(40), 3), pull=1.0) == pytest.approx(3.0, rel=1e-6)


def test_without_variation_the_pull_decides() -> None:
    clusters = np.repeat(np.arange(10), 4)
    assert design_effect(np.zeros(40), clusters, pull=1.0) == pytest.approx(4.0)
    assert design_effect(np.zeros(40), clusters, pull=0.0) == 1.0


def test_many_independent_items_in_clusters_have_almost_no_design_effect() -> None:
    values = np.random.default_rng(5).choice([0.0, 1.0], size=4000)
    assert design_effect(values, np.repeat(np.arange(1000), 4), pull=1.0) < 1.1


def test_t_interval_is_scipys() -> None:
    values = [0.2, 0.5, 0.1, 0.9, 0.4]
    expected = stats.t.interval(0.90, 4, loc=np.mean(values), scale=stats.sem(values))
    assert t_interval(values) == pytest.approx(expected)
    assert t_interval([1.0]) == (-math.inf, math.inf)


def test_t_interval_covers_skewed_window_means() -> None:
    """16 window means, each of 255 exponential values (skewness 2): the coverage is the nominal one."""
    rng = np.random.default_rng(11)
    draws = rng.gamma(shape=255, scale=1 / 255, size=(2000, 16))
    hits = [low <= 1.0 <= high for low, high in map(t_interval, draws)]
    assert np.mean(hits) == pytest.approx(0.90, abs=0.025)


def test_wilson_is_scipys_and_open_at_certainty() -> None:
    expected = stats.binomtest(37, 50).proportion_ci(0.90, method="wilson")
    assert wilson_interval(37, 50, Z) == pytest.approx((expected.low, expected.high), rel=1e-6)
    low, high = wilson_interval(50, 50, Z)
    assert high == 1.0
    assert low == pytest.approx(50 / (50 + Z**2))


def test_critical_value_grows_where_clusters_are_few() -> None:
    assert t_quantile(0.90, 5) == pytest.approx(2.1318, abs=1e-3)
    assert t_quantile(0.90, 10_000) == pytest.approx(Z, abs=1e-3)
