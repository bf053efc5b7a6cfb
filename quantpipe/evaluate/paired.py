"""What a candidate lost, and kept, on the items that both models answered. Pairs scores, and knows not what was asked.

Shapes: N items.
"""

from collections.abc import Sequence
from math import comb

import numpy as np
import numpy.typing as npt

from quantpipe.errors import DataError
from quantpipe.evaluate.intervals import (
    DEFAULT_CONFIDENCE,
    FloatArray,
    IntArray,
    Interval,
    cluster_bootstrap_interval,
    cluster_t_interval,
    design_effect,
    fieller_interval,
    ratio_interval,
    t_quantile,
    tango_interval,
    wilson_interval,
)
from quantpipe.gate.judge import Measurement

FEW_CLUSTERS = 30  # below, Student's t alone is too sure of skewed scores
FEW_DIFFERENCES = 10  # clusters that differ; with fewer, their spread says little of the losses not seen


def paired_accuracy(
    base_correct: Sequence[bool] | Sequence[float],
    cand_correct: Sequence[bool] | Sequence[float],
    clusters: Sequence[str],
    confidence: float = DEFAULT_CONFIDENCE,
) -> Measurement:
    """``accuracy_loss_points``: 100 x (mean score of the baseline - mean score of the candidate), same items.

    Where every item is right (1) or wrong (0) the interval is Tango's score interval on effective counts: items and
    flips are divided by the design effect of the clusters, and the critical value is Student's t with the clusters as
    units. Where every cluster has one item the counts are the plain ones. For scores in between see ``_score_loss``.
    At the default confidence each end is a one-sided 95 % bound. DataError where the three do not pair up, a score is
    not from 0 to 1, or fewer than two clusters leave nothing to compare.
    """
    base_N, cand_N, cluster_of_N = _paired(base_correct, cand_correct, clusters)
    loss_N, num_clusters = base_N - cand_N, int(cluster_of_N.max()) + 1
    num_lost, num_gained = int((loss_N > 0).sum()), int((loss_N < 0).sum())
    is_binary = _is_binary(base_N) and _is_binary(cand_N)
    low, high = (
        _flip_interval(loss_N, cluster_of_N, confidence)
        if is_binary
        else _score_interval(loss_N, cluster_of_N, confidence)
    )
    effect = design_effect(loss_N, cluster_of_N, pull=1.0)
    how = "Tango score interval" if is_binary else _score_how(num_clusters)
    return Measurement(
        name="accuracy_loss_points",
        value=100.0 * float(loss_N.sum()) / len(loss_N),
        low=100.0 * low,
        high=100.0 * high,
        confidence=confidence,
        num_samples=len(loss_N),
        unit="points",
        detail=f"{num_lost} lost, {num_gained} gained of {len(loss_N)} items in {num_clusters} clusters; {how}, "
        f"design effect {effect:.2f}",
    )


def paired_recovery(
    base_scores: Sequence[float],
    cand_scores: Sequence[float],
    clusters: Sequence[str],
    confidence: float = DEFAULT_CONFIDENCE,
) -> Measurement:
    """``accuracy_recovery``: mean score of the candidate / mean score of the baseline, same items.

    Right or wrong items: the score interval of the ratio, on effective counts. Scores in between: Fieller's, with
    clusters as units. The value is NaN where the baseline scored nothing, so that no limit passes. DataError as in
    ``paired_accuracy``.
    """
    base_N, cand_N, cluster_of_N = _paired(base_scores, cand_scores, clusters)
    base_mean, cand_mean = float(base_N.mean()), float(cand_N.mean())
    value = cand_mean / base_mean if base_mean > 0 else float("nan")
    loss_N, num_clusters = base_N - cand_N, int(cluster_of_N.max()) + 1
    effect = design_effect(loss_N, cluster_of_N, pull=1.0)
    if _is_binary(base_N) and _is_binary(cand_N):
        num_both, num_lost, num_gained = float((base_N * cand_N).sum()), float((loss_N > 0).sum()), (loss_N < 0).sum()
        critical = t_quantile(confidence, num_clusters)
        low, high = ratio_interval(num_both / effect, num_lost / effect, float(num_gained) / effect, critical)
        how = "score interval"
    else:
        low, high = fieller_interval(cand_N, base_N, cluster_of_N, confidence)
        if base_mean > 0:  # and no surer than the loss is, which allows for losses not seen
            loss_low, loss_high = _score_interval(loss_N, cluster_of_N, confidence)
            low, high = min(low, 1 - loss_high / base_mean), max(high, 1 - loss_low / base_mean)
        how = "Fieller interval"
    return Measurement(
        name="accuracy_recovery",
        value=value,
        low=low,
        high=high,
        confidence=confidence,
        num_samples=len(base_N),
        unit="ratio",
        detail=f"{base_mean:.4f} -> {cand_mean:.4f}; {how}, design effect {effect:.2f}",
    )


def own_accuracy(
    scores: Sequence[float], clusters: Sequence[str], confidence: float = DEFAULT_CONFIDENCE
) -> Measurement:
    """``accuracy``: the mean score of one model, against nothing.

    Right or wrong items: Wilson's interval on effective counts. Scores in between: Student's t with clusters as units,
    no narrower than Wilson's of as many whole items would be where few clusters differ. DataError as in
    ``paired_accuracy``.
    """
    score_N, _, cluster_of_N = _paired(scores, scores, clusters)
    num_clusters, mean = int(cluster_of_N.max()) + 1, float(score_N.mean())
    effect = design_effect(score_N, cluster_of_N, pull=1.0)
    num_effective = len(score_N) / effect
    low, high = wilson_interval(mean * num_effective, num_effective, t_quantile(confidence, num_clusters))
    if not _is_binary(score_N) and _num_differing(score_N - np.median(score_N), cluster_of_N) >= FEW_DIFFERENCES:
        low, high = cluster_t_interval(score_N, cluster_of_N, confidence)
    return Measurement(
        name="accuracy",
        value=mean,
        low=max(0.0, low),
        high=min(1.0, high),
        confidence=confidence,
        num_samples=len(score_N),
        unit="fraction",
        detail=f"{num_clusters} clusters, design effect {effect:.2f}",
    )


def exact_mcnemar_p(num_lost: int, num_gained: int) -> float:
    """Two-sided p of flips being as likely one way as the other: McNemar's test by the binomial distribution.

    It takes items for independent, so it is shown, and limits are judged on intervals that allow for clusters.
    """
    num_flips = num_lost + num_gained
    one_side: int = sum(comb(num_flips, k) for k in range(min(num_lost, num_gained) + 1))
    return min(1.0, float(2 * one_side / 2**num_flips))


def _paired(
    base: Sequence[bool] | Sequence[float], cand: Sequence[bool] | Sequence[float], clusters: Sequence[str]
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Both models' scores and the number of each item's cluster."""
    if not len(base) == len(cand) == len(clusters):
        raise DataError(
            f"paired accuracy: {len(base)} baseline items, {len(cand)} candidate items and {len(clusters)} "
            "cluster names do not pair up; evaluate both models on the same items"
        )
    names, cluster_of_N = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
    if len(names) < 2:
        raise DataError(f"paired accuracy: {len(names)} independent clusters of items; at least 2 are needed")
    base_N, cand_N = np.asarray(base, dtype=np.float64), np.asarray(cand, dtype=np.float64)
    for scores_N in (base_N, cand_N):
        bad_N = ~((scores_N >= 0) & (scores_N <= 1))  # NaN, too
        if bad_N.any():
            raise DataError(f"paired accuracy: a score is {scores_N[bad_N][0]}; scores are from 0 to 1")
    return base_N, cand_N, cluster_of_N


def _is_binary(scores_N: FloatArray) -> bool:
    return bool(((scores_N == 0) | (scores_N == 1)).all())


def _num_differing(loss_N: FloatArray, cluster_of_N: IntArray) -> int:
    """Clusters in which any item differs."""
    differs_N: npt.NDArray[np.bool_] = loss_N != 0
    return len(np.unique(cluster_of_N[differs_N]))


def _flip_interval(loss_N: FloatArray, cluster_of_N: IntArray, confidence: float) -> Interval:
    """Tango's, of the signs of the differences: each one counted as a whole flip."""
    sign_N = np.sign(loss_N)
    effect = design_effect(sign_N, cluster_of_N, pull=1.0)
    num_lost, num_gained = float((sign_N > 0).sum()), float((sign_N < 0).sum())
    critical = t_quantile(confidence, int(cluster_of_N.max()) + 1)
    return tango_interval(num_lost / effect, num_gained / effect, len(loss_N) / effect, critical)


def _score_interval(loss_N: FloatArray, cluster_of_N: IntArray, confidence: float) -> Interval:
    """Of the mean loss where scores lie in between: Student's t with clusters as units.

    Few clusters: no narrower than the bootstrap that draws clusters. Few that differ: no narrower than if each
    difference were a whole flip, for what was not seen may be: without any difference t would have no width at all.
    """
    intervals = [cluster_t_interval(loss_N, cluster_of_N, confidence)]
    if int(cluster_of_N.max()) + 1 < FEW_CLUSTERS:
        intervals.append(cluster_bootstrap_interval(loss_N, cluster_of_N, confidence))
    if _num_differing(loss_N, cluster_of_N) < FEW_DIFFERENCES:
        intervals.append(_flip_interval(loss_N, cluster_of_N, confidence))
    return min(low for low, _ in intervals), max(high for _, high in intervals)


def _score_how(num_clusters: int) -> str:
    return "cluster t interval" + (" and cluster bootstrap" if num_clusters < FEW_CLUSTERS else "")
