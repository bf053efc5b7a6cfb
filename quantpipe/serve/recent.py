"""Figures of the last minute, for people who look now: percentiles without a database."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0
MAX_SAMPLES = 2048


@dataclass(frozen=True)
class Percentiles:
    """Of ``num`` values; None where there were none."""

    num: int
    p50: float | None
    p95: float | None


class RecentValues:
    """The latest values, at most ``MAX_SAMPLES``, of the last ``WINDOW_S`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def add(self, value: float) -> None:
        """A value of just now."""
        self._values.append((self._clock(), value))

    def values(self) -> list[float]:
        """Those that are recent enough."""
        since_s = self._clock() - WINDOW_S
        while self._values and self._values[0][0] < since_s:
            self._values.popleft()
        return [value for _, value in self._values]

    def percentiles(self) -> Percentiles:
        """See ``percentiles_of``."""
        return percentiles_of(self)


def percentiles_of(*recent: RecentValues) -> Percentiles:
    """Of all of them together. Each is one of the values: the least that so large a share does not exceed."""
    values = sorted(value for own in recent for value in own.values())
    return Percentiles(len(values), _at(values, 0.5), _at(values, 0.95))


def _at(values: list[float], share: float) -> float | None:
    return values[min(int(share * len(values)), len(values) - 1)] if values else None
