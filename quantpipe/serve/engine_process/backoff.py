"""How long to wait before an engine is started again, and when there should be one. Knows no processes."""

import itertools
import math
import time
from collections.abc import Callable, Iterator

FIRST_RESTART_S = 1.0
LAST_RESTART_S = 30.0
NUM_DOUBLED = 5


class Backoff:
    """At first soon, then less and less often: 1, 2, 4, 8, 16, 30, 30 ... seconds.

    ``start_s`` is how long the last start took that succeeded; the next one is judged by it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.start_s = 0.0
        self._clock = clock
        self._delays = _delays()
        self._ready_s = 0.0  # when the next engine should be ready

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until there should be an engine; at least 1."""
        return max(1, math.ceil(self._ready_s - self._clock()))

    def next_delay_s(self) -> float:
        """How long to wait, from now."""
        delay_s = next(self._delays)
        self._ready_s = self._clock() + delay_s + self.start_s
        return delay_s

    def reset(self) -> None:
        """An engine has served: should it be lost, the next one is due soon."""
        self._delays = _delays()


def _delays() -> Iterator[float]:
    doubled = (FIRST_RESTART_S * 2**power for power in range(NUM_DOUBLED))
    return itertools.chain(doubled, itertools.repeat(LAST_RESTART_S))
