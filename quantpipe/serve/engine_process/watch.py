"""How long an engine has not moved, by the answers it gives. Knows no clock and no processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WatchLimits:
    """Seconds in one step, or without an answer, after which an engine is not ready, and after which it is killed.

    One that is not ready ``load_s`` seconds after it was started is killed, too.
    """

    stalled_s: float = 30.0
    hung_s: float = 120.0
    load_s: float = 1800.0

    @property
    def interval_s(self) -> float:
        """How often to ask: often enough to be exact to a quarter of the smaller limit."""
        return min(1.0, self.stalled_s / 4, self.hung_s / 4)


class EngineWatch:
    """Adds up the time since an engine last showed that it moves: that it is idle, or in another step than before.

    The caller tells how much time has passed. A pause of the caller itself, which learns nothing in it, counts as no
    more than two intervals: a job that is stopped and continued as a whole is not taken for one that hangs.
    """

    def __init__(self, interval_s: float) -> None:
        self.still_s = 0.0
        self.is_asked = False
        self._most_s = 2 * interval_s
        self._round: int | None = None

    def pass_time(self, seconds: float) -> None:
        """So much time has passed without news."""
        self.still_s += min(seconds, self._most_s)

    def ask(self) -> bool:
        """Whether to ask now: not while an answer is outstanding."""
        if self.is_asked:
            return False
        self.is_asked = True
        return True

    def answered(self, round: int | None) -> None:
        """It computes the step of this round; None: it is idle."""
        self.is_asked = False
        if round is None or round != self._round:
            self.moved()
        self._round = round

    def moved(self) -> None:
        """It finished a step."""
        self.still_s = 0.0
