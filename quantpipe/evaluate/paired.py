"""How many points a candidate lost on the items both models answered. Pairs items, and knows not what they ask."""

from collections.abc import Sequence

import numpy as np

from quantpipe.errors import DataError
from quantpipe.evaluate.intervals import DEFAULT_CONFIDENCE, design_effect, t_quantile, tango_interval
from quantpipe.gate.judge import Measurement


def paired_accuracy(
    base_correct: Sequence[bool],
    cand_correct: Sequence[bool],
    clusters: Sequence[str],
    confidence: float = DEFAULT_CONFIDENCE,
) -> Measurement:
    """``accuracy_loss_points``: 100 x (share the baseline has right - share the candidate has right), same items.

    The interval is Tango's score interval on effective counts: items and flips are divided by the design effect of the
    clusters, and the critical value is Student's t with the clusters as units. Where every cluster has one item the
    counts are the plain ones. At the default confidence each end is a one-sided 95 % bound.
    DataError where the three do not pair up or fewer than two clusters leave nothing to compare.
    """
    num_items = len(base_correct)
    if not num_items == len(cand_correct) == len(clusters):
        raise DataError(
            f"paired accuracy: {num_items} baseline items, {len(cand_correct)} candidate items and {len(clusters)} "
            "cluster names do not pair up; evaluate both models on the same items"
        )
    names, cluster_of_N = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
    if len(names) < 2:
        raise DataError(f"paired accuracy: {len(names)} independent clusters of items; at least 2 are needed")
    base_N, cand_N = np.asarray(base_correct, dtype=bool), np.asarray(cand_correct, dtype=bool)
    loss_N = base_N.astype(np.float64) - cand_N.astype(np.float64)
    num_lost, num_gained = int((loss_N > 0).sum()), int((loss_N < 0).sum())
    effect = design_effect(loss_N, cluster_of_N, pull=1.0)
    low, high = tango_interval(
        num_lost / effect, num_gained / effect, num_items / effect, t_quantile(confidence, len(names))
    )
    value = 100.0 * (num_lost - num_gained) / num_items
    return Measurement(
        name="accuracy_loss_points",
        value=value,
        low=100.0 * low,
        high=100.0 * high,
        confidence=confidence,
        num_samples=num_items,
        unit="points",
        detail=f"{num_lost} lost, {num_gained} gained of {num_items} items in {len(names)} clusters; Tango score "
        f"interval, design effect {effect:.2f}",
    )
