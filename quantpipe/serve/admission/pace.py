"""When a place will be free, judged by how fast places became free of late."""

import math
import time
from collections import deque
from collections.abc import Callable

NUM_RELEASES = 64  # what "of late" means
MIN_WAIT_S, MAX_WAIT_S = 1, 60


class Pace:
    """Amounts that were given back, and those for which somebody was told to come again.

    Who is turned away stands in a line that nobody enforces: the next one is told a later time, so that not all come
    back in the same second.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._releases: deque[tuple[float, float]] = deque(maxlen=NUM_RELEASES)  # when, how much
        self._promises: deque[tuple[float, float]] = deque()  # until when, how much
        self._num_promised = 0.0

    def released(self, amount: float) -> None:
        """So much was given back just now."""
        self._releases.append((self._clock(), amount))

    def retry_after_s(self, amount: float) -> int:
        """Whole seconds until ``amount`` is free for whoever asks now. The least there is while nothing is known."""
        now_s = self._clock()
        while self._promises and self._promises[0][0] <= now_s:
            self._num_promised -= self._promises.popleft()[1]
        rate = self._per_s(now_s)
        wait_s = (amount + self._num_promised) / rate if rate > 0 else 0.0
        wait_s = min(max(wait_s, MIN_WAIT_S), MAX_WAIT_S)
        if wait_s < MAX_WAIT_S:  # beyond that the line is not followed
            self._promises.append((now_s + wait_s, amount))
            self._num_promised += amount
        return math.ceil(wait_s)

    def _per_s(self, now_s: float) -> float:
        """Up to now, so that a server that has stopped giving back is told from a fast one."""
        if len(self._releases) < 2:
            return 0.0
        first_s = self._releases[0][0]
        amount = sum(own for _, own in self._releases) - self._releases[0][1]
        return amount / max(now_s - first_s, 1e-6)
