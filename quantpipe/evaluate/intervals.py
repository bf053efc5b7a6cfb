"""Confidence intervals for clustered and paired samples. Knows numbers only, not what they were measured on.

All intervals are two-sided; at the default confidence of 0.90 each end is also a one-sided 95 % bound, which is what
a limit is judged on.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri, stdtrit  # scipy.stats would take longer to import than a verdict takes

DEFAULT_CONFIDENCE = 0.90
NUM_BISECTIONS = 48  # of an interval of length 2: 1e-14
NUM_RESAMPLES = 2000
BOOTSTRAP_SEED = 20_260_131  # fixed, so that one set of results always gives one verdict
Interval = tuple[float, float]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]


def t_quantile(confidence: float, num_units: int) -> float:
    """The two-sided critical value with ``num_units`` independent units: Student's t, near the normal for many."""
    return float(stdtrit(num_units - 1, 0.5 + confidence / 2))


def t_interval(values: Sequence[float] | FloatArray, confidence: float = DEFAULT_CONFIDENCE) -> Interval:
    """Student's t interval for the mean of independent values; [-inf, inf] for fewer than two."""
    values_N = np.asarray(values, dtype=np.float64)
    if len(values_N) < 2:
        return -math.inf, math.inf
    half = t_quantile(confidence, len(values_N)) * float(values_N.std(ddof=1)) / math.sqrt(len(values_N))
    mean = float(values_N.mean())
    return mean - half, mean + half


def design_effect(values_N: FloatArray, cluster_of_N: IntArray, pull: float) -> float:
    """How many times larger the variance of the mean is than if the items were independent; at least 1.

    The ratio of the cluster-robust variance to the independent one (Kish, Survey Sampling, 1965), pulled towards full
    dependence within clusters by the weight of ``pull`` varying items: where nothing varies and the data cannot say,
    a ``pull`` of 1 counts each cluster as one unit, and a ``pull`` of 0 takes the items for independent.
    """
    sizes_K = np.bincount(cluster_of_N)
    full_dependence = float((sizes_K**2).sum() / sizes_K.sum())
    centred_N = values_N - values_N.mean()
    sums_K = np.bincount(cluster_of_N, weights=centred_N)
    varying, varying_by_cluster = float((centred_N**2).sum()), float((sums_K**2).sum())
    if varying + pull == 0:
        return 1.0
    return max(1.0, (varying_by_cluster + pull * full_dependence) / (varying + pull))


def design_effect_of_counts(hits_K: FloatArray, sizes_K: npt.NDArray[np.int_]) -> float:
    """``design_effect`` without a pull of items that are 0 or 1, from the number of ones in each cluster."""
    mean = float(hits_K.sum()) / float(sizes_K.sum())
    varying = float(sizes_K.sum()) * mean * (1 - mean)
    return 1.0 if varying <= 0 else max(1.0, float(((hits_K - mean * sizes_K) ** 2).sum()) / varying)


def tango_interval(num_lost: float, num_gained: float, num_items: float, critical: float) -> Interval:
    """Score interval for the difference of two paired proportions, (num_lost - num_gained) / num_items.

    Tango, Statistics in Medicine 17 (1998) 891-908: the differences whose score test does not reject. Unlike Wald's,
    it keeps its width when no item flips: with none lost and none gained it is +- z^2 / (n + z^2). Counts may be
    fractional (effective counts).
    """

    def score(difference: float) -> float:
        a = 2 * num_items
        b = -num_lost - num_gained + (2 * num_items - num_lost + num_gained) * difference
        c = -num_gained * difference * (1 - difference)
        gained_frac = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = num_items * (2 * gained_frac + difference * (1 - difference))
        return (num_lost - num_gained - num_items * difference) / math.sqrt(max(variance, 1e-300))

    return _crossing(lambda x: score(x) - critical, -1.0), _crossing(lambda x: score(x) + critical, 1.0)


def _crossing(decreasing: Callable[[float], float], end: float) -> float:
    """Where a decreasing function on (-1, 1) is zero; ``end`` where it has no zero inside."""
    inside = 1 - 1e-12
    low, high = -inside, inside
    if decreasing(low) <= 0 or decreasing(high) >= 0:
        return end
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return (low + high) / 2


def wilson_interval(num_hits: float, num_items: float, critical: float) -> Interval:
    """Score interval for a proportion (Wilson, 1927); not zero-width at 0 or 1. Counts may be fractional."""
    num_hits, num_items, z2 = float(num_hits), float(num_items), critical**2
    centre = (num_hits + z2 / 2) / (num_items + z2)
    spread = num_hits * (num_items - num_hits) / num_items + z2 / 4
    half = critical / (num_items + z2) * math.sqrt(max(spread, 0.0))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return (0.0 if num_hits == 0 else low), (1.0 if num_hits == num_items else high)  # exact where rounding is not


def ratio_interval(num_both: float, num_lost: float, num_gained: float, critical: float) -> Interval:
    """Score interval for the ratio of two paired proportions, candidate's share / baseline's share.

    Tang, Tang and Chan, Statistics in Medicine 22 (2003) 1217-1233: the ratios whose score test does not reject. Like
    Tango's it keeps its width when no item flips. Counts may be fractional: items right in both, only in the baseline
    (lost), only in the candidate (gained); items wrong in both do not matter. ``[0, inf]`` where the baseline has none
    right.
    """
    num_seen = num_both + num_lost + num_gained
    if num_both + num_lost <= 0:
        return 0.0, math.inf

    def score(ratio: float) -> float:
        a = 1 + ratio
        b = (num_both + num_lost) * ratio**2 - (num_both + num_gained + 2 * num_lost)
        c = num_lost * (1 - ratio) * num_seen
        lost = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)  # most likely where the ratio is this one
        variance = a * lost + num_seen * (ratio - 1)
        return (num_both + num_gained - ratio * (num_both + num_lost)) / math.sqrt(max(variance, 1e-300))

    def ratio_at(place: float) -> float:
        return (1 + place) / (1 - place) if place < 1 else math.inf

    low = _crossing(lambda place: score(ratio_at(place)) - critical, -1.0)
    high = _crossing(lambda place: score(ratio_at(place)) + critical, 1.0)
    return ratio_at(low), ratio_at(high)


def cluster_t_interval(values_N: FloatArray, cluster_of_N: IntArray, confidence: float) -> Interval:
    """Student's t interval for the mean of items whose clusters are the independent units; at least 2 of them.

    The variance is that of a ratio of cluster sums to cluster sizes (Cochran, Sampling Techniques, 1977, chapter 6).
    """
    sizes_K = np.bincount(cluster_of_N)
    residuals_K = np.bincount(cluster_of_N, weights=values_N - values_N.mean())
    num_clusters = len(sizes_K)
    variance = num_clusters / (num_clusters - 1) * float((residuals_K**2).sum()) / len(values_N) ** 2
    half = t_quantile(confidence, num_clusters) * math.sqrt(variance)
    return float(values_N.mean()) - half, float(values_N.mean()) + half


def cluster_bootstrap_interval(values_N: FloatArray, cluster_of_N: IntArray, confidence: float) -> Interval:
    """Bias-corrected and accelerated bootstrap of the mean that draws whole clusters, always with the same draws.

    Efron, Journal of the American Statistical Association 82 (1987), 171-185; the acceleration is the jackknife's.
    """
    sums_K = np.bincount(cluster_of_N, weights=values_N)
    sizes_K = np.bincount(cluster_of_N).astype(np.float64)
    num_clusters, mean = len(sizes_K), float(values_N.mean())
    drawn_RK = np.random.default_rng(BOOTSTRAP_SEED).integers(num_clusters, size=(NUM_RESAMPLES, num_clusters))
    means_R = np.sort(sums_K[drawn_RK].sum(axis=1) / sizes_K[drawn_RK].sum(axis=1))
    if means_R[0] == means_R[-1]:
        return mean, mean
    below = (np.count_nonzero(means_R < mean) + np.count_nonzero(means_R <= mean)) / (2 * NUM_RESAMPLES)
    bias = float(ndtri(min(max(below, 1 / NUM_RESAMPLES), 1 - 1 / NUM_RESAMPLES)))
    without_K = (sums_K.sum() - sums_K) / (sizes_K.sum() - sizes_K)
    pulls_K = without_K.mean() - without_K
    spread = 6 * float((pulls_K**2).sum()) ** 1.5
    acceleration = float((pulls_K**3).sum()) / spread if spread > 0 else 0.0

    def quantile(frac: float) -> float:
        z = bias + float(ndtri(frac))
        return float(np.quantile(means_R, float(ndtr(bias + z / (1 - acceleration * z)))))

    return min(mean, quantile((1 - confidence) / 2)), max(mean, quantile((1 + confidence) / 2))


def fieller_interval(top_N: FloatArray, bottom_N: FloatArray, cluster_of_N: IntArray, confidence: float) -> Interval:
    """Fieller's interval for the ratio of two paired means, ``top / bottom``, with clusters as independent units.

    Journal of the Royal Statistical Society B 16 (1954), 175-185. ``[-inf, inf]`` where the mean below may be 0.
    """
    top, bottom = float(top_N.mean()), float(bottom_N.mean())
    sizes_K = np.bincount(cluster_of_N)
    num_clusters, num_items = len(sizes_K), len(top_N)
    tops_K = np.bincount(cluster_of_N, weights=top_N - top)
    bottoms_K = np.bincount(cluster_of_N, weights=bottom_N - bottom)
    scale = t_quantile(confidence, num_clusters) ** 2 * num_clusters / (num_clusters - 1) / num_items**2
    top_var, bottom_var = scale * float((tops_K**2).sum()), scale * float((bottoms_K**2).sum())
    shared = scale * float((tops_K * bottoms_K).sum())
    a, b, c = bottom**2 - bottom_var, top * bottom - shared, top**2 - top_var
    if a <= 0:
        return -math.inf, math.inf
    half = math.sqrt(max(b * b - a * c, 0.0))
    return (b - half) / a, (b + half) / a
