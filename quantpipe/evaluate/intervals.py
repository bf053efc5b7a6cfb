"""Confidence intervals for clustered and paired samples. Knows numbers only, not what they were measured on.

All intervals are two-sided; at the default confidence of 0.90 each end is also a one-sided 95 % bound, which is what
a limit is judged on.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

DEFAULT_CONFIDENCE = 0.90
Interval = tuple[float, float]
FloatArray = npt.NDArray[np.float64]


def t_quantile(confidence: float, num_units: int) -> float:
    """The two-sided critical value with ``num_units`` independent units: Student's t, near the normal for many."""
    return float(stats.t.ppf(0.5 + confidence / 2, num_units - 1))


def t_interval(values: Sequence[float] | FloatArray, confidence: float = DEFAULT_CONFIDENCE) -> Interval:
    """Student's t interval for the mean of independent values; [-inf, inf] for fewer than two."""
    values_N = np.asarray(values, dtype=np.float64)
    if len(values_N) < 2:
        return -math.inf, math.inf
    half = t_quantile(confidence, len(values_N)) * float(values_N.std(ddof=1)) / math.sqrt(len(values_N))
    mean = float(values_N.mean())
    return mean - half, mean + half


def design_effect(values_N: FloatArray, cluster_of_N: npt.NDArray[np.intp], pull: float) -> float:
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
    if decreasing(-inside) <= 0 or decreasing(inside) >= 0:
        return end
    return float(optimize.brentq(decreasing, -inside, inside, xtol=1e-12))


def wilson_interval(num_hits: float, num_items: float, critical: float) -> Interval:
    """Score interval for a proportion (Wilson, 1927); not zero-width at 0 or 1. Counts may be fractional."""
    num_hits, num_items, z2 = float(num_hits), float(num_items), critical**2
    centre = (num_hits + z2 / 2) / (num_items + z2)
    spread = num_hits * (num_items - num_hits) / num_items + z2 / 4
    half = critical / (num_items + z2) * math.sqrt(max(spread, 0.0))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return (0.0 if num_hits == 0 else low), (1.0 if num_hits == num_items else high)  # exact where rounding is not
