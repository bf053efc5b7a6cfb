"""Intervals against independent computations, exact coverage and known values."""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from quantpipe.evaluate.intervals import (
    cluster_bootstrap_interval,
    cluster_t_interval,
    design_effect,
    design_effect_of_counts,
    fieller_interval,
    ratio_interval,
    t_interval,
    t_quantile,
    tango_interval,
    wilson_interval,
)

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


def test_tango_gives_the_published_ends() -> None:
    """Tango 1998: 44 patients, one discordant pair, 90 %. Fagerland, Lydersen and Laake 2014, table V: 21 patients with
    1 and 7 discordant pairs, 95 %."""
    assert tango_interval(0, 1, 44, Z) == pytest.approx((-0.096, 0.037), abs=5e-4)
    assert tango_interval(1, 7, 21, float(stats.norm.ppf(0.975))) == pytest.approx((-0.517, -0.026), abs=5e-4)


def ratio_score(num_both: int, num_lost: int, num_gained: int, num_items: int, ratio: float) -> float:
    """The score test of a ratio of paired proportions, with its likelihood maximised numerically."""
    rest = num_items - num_both - num_lost - num_gained

    def unlikelihood(fracs: np.ndarray) -> float:
        both, lost = fracs
        gained = ratio * (both + lost) - both
        left = 1 - both - lost - gained
        if min(both, lost, gained, left) < 0:
            return math.inf
        parts = ((num_both, both), (num_lost, lost), (num_gained, gained), (rest, left))
        return -float(sum(special.xlogy(count, frac) for count, frac in parts))

    best = min(
        (
            optimize.minimize(unlikelihood, start, method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-12})
            for start in ([0.3 * min(1, ratio), 0.1], [0.1 * min(1, ratio), 0.2], [0.02, 0.2], [0.02, 0.02])
        ),
        key=lambda found: found.fun,
    )
    both, lost = best.x
    gained = ratio * (both + lost) - both
    variance = num_items * (gained + ratio**2 * lost + (1 - ratio) ** 2 * both)
    return (num_both + num_gained - ratio * (num_both + num_lost)) / math.sqrt(variance)


def test_ratio_interval_gives_the_published_ends() -> None:
    """Fagerland, Lydersen and Laake 2014: 1 of 21 patients with both, 7 and 1 with one, 95 %."""
    assert ratio_interval(1, 7, 1, float(stats.norm.ppf(0.975))) == pytest.approx((0.065, 0.907), abs=5e-4)


@pytest.mark.filterwarnings("ignore:invalid value")  # infinities where the search leaves the legal shares
@pytest.mark.parametrize(("num_both", "num_lost", "num_gained"), [(120, 12, 7), (90, 20, 20), (150, 3, 9), (1, 7, 1)])
def test_ratio_ends_are_where_the_numerically_maximised_score_test_stops_rejecting(
    num_both: int, num_lost: int, num_gained: int
) -> None:
    low, high = ratio_interval(num_both, num_lost, num_gained, Z)
    assert ratio_score(num_both, num_lost, num_gained, NUM_ITEMS, low) == pytest.approx(Z, abs=2e-3)
    assert ratio_score(num_both, num_lost, num_gained, NUM_ITEMS, high) == pytest.approx(-Z, abs=2e-3)


@pytest.mark.parametrize(("lost_frac", "gained_frac"), [(0.0, 0.0), (0.01, 0.01), (0.04, 0.01), (0.08, 0.05)])
def test_ratio_interval_covers_the_true_ratio(lost_frac: float, gained_frac: float) -> None:
    rng = np.random.default_rng(17)
    both_frac = 0.6
    fracs = [both_frac, lost_frac, gained_frac, 1 - both_frac - lost_frac - gained_frac]
    true = (both_frac + gained_frac) / (both_frac + lost_frac)
    draws = rng.multinomial(200, fracs, size=3000)
    lows = np.array([ratio_interval(*map(float, counts), Z)[0] for counts in draws[:, :3]])
    assert np.mean(lows > true) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 3000)  # a false pass
    low, high = ratio_interval(120, 0, 0, Z)
    assert low < 1 < high  # no flip still leaves a width


def test_ratio_of_nothing_is_unbounded() -> None:
    assert ratio_interval(0, 0, 5, Z) == (0.0, math.inf)


def test_cluster_t_interval_is_t_of_clusters_of_one_item_and_of_cluster_means_of_one_size() -> None:
    values = np.random.default_rng(2).normal(size=60)
    assert cluster_t_interval(values, np.arange(60), 0.9) == pytest.approx(t_interval(values, 0.9))
    means = values.reshape(20, 3).mean(axis=1)
    assert cluster_t_interval(values, np.repeat(np.arange(20), 3), 0.9) == pytest.approx(t_interval(means, 0.9))


def test_bootstrap_is_scipys_repeats_itself_and_draws_nothing_of_the_callers() -> None:
    values = np.random.default_rng(3).exponential(size=25)
    clusters = np.arange(25)
    found = cluster_bootstrap_interval(values, clusters, 0.9)
    assert found == cluster_bootstrap_interval(values, clusters, 0.9)
    expected = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=0.9,
        n_resamples=20_000,
        method="BCa",
        random_state=np.random.default_rng(4),
    ).confidence_interval
    assert found == pytest.approx((expected.low, expected.high), abs=0.03)
    assert cluster_bootstrap_interval(np.full(25, 0.5), clusters, 0.9) == (0.5, 0.5)


def test_fieller_interval_holds_the_ratios_whose_difference_may_be_zero() -> None:
    rng = np.random.default_rng(6)
    bottom = rng.uniform(0.4, 0.9, size=80)
    top = bottom * 0.95 + rng.normal(0, 0.05, size=80)
    clusters = np.repeat(np.arange(40), 2)
    for end in fieller_interval(top, bottom, clusters, 0.9):
        low, high = cluster_t_interval(top - end * bottom, clusters, 0.9)
        assert min(abs(low), abs(high)) == pytest.approx(0, abs=1e-9)
    assert fieller_interval(top, rng.normal(0, 1, size=80), clusters, 0.9) == (-math.inf, math.inf)


def test_design_effect_of_counts_is_that_of_the_items() -> None:
    rng = np.random.default_rng(8)
    clusters = np.repeat(np.arange(12), rng.integers(2, 9, size=12))
    hits = (rng.random(len(clusters)) < np.repeat(rng.random(12), np.bincount(clusters))).astype(float)
    counts = np.bincount(clusters, weights=hits)
    assert design_effect_of_counts(counts, np.bincount(clusters)) == pytest.approx(design_effect(hits, clusters, 0.0))
    assert design_effect_of_counts(np.zeros(3), np.array([4, 4, 4])) == 1.0
