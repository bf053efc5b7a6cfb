"""How much there was in the last seconds."""

import math
import time
from collections import deque
from collections.abc import Callable


class SlidingSum:
    """What was added in the last ``window_s`` seconds. Kept by the second, so that up to one second more counts."""

    def __init__(self, window_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.window_s = window_s
        self._clock = clock
        self._parts: deque[list[float]] = deque()  # second, amount
        self._total = 0.0

    @property
    def total(self) -> float:
        """The sum now."""
        self._forget()
        return self._total

    def add(self, amount: float) -> None:
        """Count ``amount`` from now on."""
        second = math.floor(self._clock())
        if self._parts and self._parts[-1][0] == second:
            self._parts[-1][1] += amount
        else:
            self._forget()
            self._parts.append([second, amount])
        self._total += amount

    def seconds_until_below(self, limit: float) -> float:
        """How long until the sum is below ``limit``, if nothing is added."""
        now_s = self._clock()
        left = self.total
        for second, amount in self._parts:
            if left < limit:
                break
            left -= amount
            if left < limit:
                return max(0.0, second + 1 + self.window_s - now_s)
        return 0.0

    def _forget(self) -> None:
        oldest = self._clock() - self.window_s - 1
        while self._parts and self._parts[0][0] <= oldest:
            self._total -= self._parts.popleft()[1]
