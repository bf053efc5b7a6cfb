"""Where a value lies on an axis, and which round values are marked there."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quantpipe.gate.report import figure


@dataclass(frozen=True)
class Scale:
    """Maps ``low .. high`` to ``start .. end`` pixels; what lies outside is put on the edge."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value. Infinities are at the edges, NaN at the start."""
        low, high, at = (_log(each) if self.is_log else each for each in (self.low, self.high, value))
        if math.isnan(at) or high <= low:
            return self.start
        frac = min(max((at - low) / (high - low), 0.0), 1.0)
        return self.start + frac * (self.end - self.start)


def scale_of(
    values: Iterable[float], start: float, end: float, from_zero: bool = False, margin_frac: float = 0.08
) -> Scale:
    """A linear axis that has room for all finite values, and for zero where it begins there."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        spread = abs(low) or 1.0
        low, high = (low, low + spread) if from_zero else (low - spread, high + spread)
    margin = margin_frac * (high - low)
    return Scale(low if from_zero and low == 0 else low - margin, high if from_zero and high == 0 else high + margin,
                 start, end)  # fmt: skip


def ticks(scale: Scale, num_most: int) -> list[float]:
    """At most ``num_most`` round values within the axis."""
    span = scale.high - scale.low
    if span <= 0 or not math.isfinite(span):
        return []
    magnitude = 10.0 ** math.floor(math.log10(span / num_most))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * magnitude
        first, last = math.ceil(scale.low / step - 1e-9), math.floor(scale.high / step + 1e-9)
        if last - first < num_most:
            return [number * step for number in range(first, last + 1)]
    return []


def tick_text(value: float) -> str:
    """A mark's value, short enough to stand beside others."""
    return f"{value:.3g}" if abs(value) >= 1e6 else figure(value)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
