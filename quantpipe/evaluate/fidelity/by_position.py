"""Whether two models drift apart as the text before a position gets longer.

Shapes: W windows, T positions of a window that predict a token.
"""

from dataclasses import dataclass

import numpy as np

from quantpipe.evaluate.intervals import FloatArray, Interval, t_interval

FIRST_TOKENS = 16  # positions with fewer tokens before them are one bucket
MIN_SLOPE_TOKENS = 64  # windows with fewer say nothing about long text


@dataclass(frozen=True)
class PositionRow:
    """Mean KL, in nats, of the positions with ``first`` to ``last`` tokens of text before the one predicted."""

    first: int
    last: int
    mean_kl: float
    low: float
    high: float


def position_rows(kl_WT: FloatArray, confidence: float) -> tuple[PositionRow, ...]:
    """Positions in buckets that double; intervals are Student's t over the windows' means in a bucket."""
    num_positions, rows, first = kl_WT.shape[1], [], 1
    while first <= num_positions:
        last = min(FIRST_TOKENS - 1 if first < FIRST_TOKENS else 2 * first - 1, num_positions)
        means_W = kl_WT[:, first - 1 : last].mean(axis=1)
        low, high = t_interval(means_W, confidence)
        rows.append(PositionRow(first, last, float(means_W.mean()), max(low, 0.0), high))
        first = last + 1
    return tuple(rows)


def slope_per_doubling(kl_WT: FloatArray, confidence: float) -> tuple[float, Interval] | None:
    """Nats by which KL changes with each doubling of the text before, and the interval over the windows' slopes.

    Each window has the slope of least squares of its buckets' means from ``FIRST_TOKENS`` on, so that windows are
    compared with themselves. None for windows shorter than ``MIN_SLOPE_TOKENS``, or fewer than two.
    """
    num_windows, num_positions = kl_WT.shape
    if num_positions < MIN_SLOPE_TOKENS or num_windows < 2:
        return None
    starts = [FIRST_TOKENS << n for n in range(num_positions.bit_length()) if FIRST_TOKENS << n <= num_positions]
    means_WB = np.stack([kl_WT[:, first - 1 : 2 * first - 1].mean(axis=1) for first in starts], axis=1)
    steps_B = np.arange(len(starts)) - (len(starts) - 1) / 2
    slopes_W = means_WB @ steps_B / (steps_B**2).sum()
    return float(slopes_W.mean()), t_interval(slopes_W, confidence)
