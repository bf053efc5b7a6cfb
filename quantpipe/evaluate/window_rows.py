"""What came of reading windows of held-out text with two models, and the gate's measurements of it.

Knows neither models nor logits: what is stored of a run is enough to measure again at another confidence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantpipe.evaluate.intervals import (
    DEFAULT_CONFIDENCE,
    design_effect_of_counts,
    t_interval,
    t_quantile,
    wilson_interval,
)
from quantpipe.gate.judge import Measurement


@dataclass(frozen=True)
class WindowRow:
    """One window: means over its ``num_positions`` predicted positions (``max_kl``: the largest), in nats where not a
    fraction."""

    base_nll: float
    cand_nll: float
    mean_kl: float
    max_kl: float
    top1_agreement: float
    num_positions: int


def measure_windows(rows: Sequence[WindowRow], confidence: float = DEFAULT_CONFIDENCE) -> tuple[Measurement, ...]:
    """Perplexity ratio, mean KL and top-1 agreement, with the windows as the independent units: Student's t over window
    means (of the log ratio for perplexity), Wilson's score interval with the windows' design effect for agreement."""
    return _perplexity_ratio(rows, confidence), _mean_kl(rows, confidence), _top1_agreement(rows, confidence)


def _perplexity_ratio(rows: Sequence[WindowRow], confidence: float) -> Measurement:
    """exp(mean nll of the candidate - mean nll of the baseline); the interval is Student's t on the log."""
    log_ratios_W = np.array([row.cand_nll - row.base_nll for row in rows])
    low, high = t_interval(log_ratios_W, confidence)
    return Measurement(
        name="perplexity_ratio",
        value=math.exp(log_ratios_W.mean()),
        low=math.exp(low),
        high=math.exp(high),
        confidence=confidence,
        num_samples=len(rows),
        unit="ratio",
        detail="t interval of the log ratio over windows",
    )


def _mean_kl(rows: Sequence[WindowRow], confidence: float) -> Measurement:
    kl_W = np.array([row.mean_kl for row in rows])
    low, high = t_interval(kl_W, confidence)
    return Measurement(
        name="mean_kl",
        value=float(kl_W.mean()),
        low=max(low, 0.0),
        high=high,
        confidence=confidence,
        num_samples=len(rows),
        unit="nats",
        detail="t interval over window means of KL(baseline || candidate)",
    )


def _top1_agreement(rows: Sequence[WindowRow], confidence: float) -> Measurement:
    sizes_W = np.array([row.num_positions for row in rows])
    hits_W = np.round(np.array([row.top1_agreement for row in rows]) * sizes_W)
    num_hits, num_positions = float(hits_W.sum()), int(sizes_W.sum())
    effect = design_effect_of_counts(hits_W, sizes_W)  # positions of a window depend on each other little: no pull
    low, high = wilson_interval(num_hits / effect, num_positions / effect, t_quantile(confidence, len(rows)))
    return Measurement(
        name="top1_agreement",
        value=num_hits / num_positions,
        low=low,
        high=high,
        confidence=confidence,
        num_samples=len(rows),
        unit="fraction",
        detail=f"{num_positions:,} positions; Wilson score interval, windows as clusters, design effect {effect:.2f}",
    )
