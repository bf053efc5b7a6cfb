"""What one key may use: requests at a time, requests and tokens in any minute."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from quantpipe.serve.admission.limits import RefusedError
from quantpipe.serve.admission.sliding_sum import SlidingSum

MINUTE_S = 60


@dataclass(frozen=True)
class KeyLimits:
    """None: no limit. Tokens are those of prompts and outputs."""

    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class KeyUsage:
    """What a key has used of its limits.

    Tokens count as they are used: a request begins while the minute's tokens are not used up, whatever it may need, so
    that the limit is exceeded by no more than what runs at a time; what was used too much is waited for.
    """

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.num_open = 0
        self._requests, self._tokens = SlidingSum(MINUTE_S, clock), SlidingSum(MINUTE_S, clock)

    def begin(self) -> None:
        """Open one more request. Raises RefusedError (429) where a limit is reached."""
        limits = self.limits
        if limits.max_concurrent is not None and self.num_open >= limits.max_concurrent:
            raise _refused(f"{self.num_open} requests at a time, as many as this key may have open", 1)
        for used, most, what in (
            (self._requests, limits.requests_per_minute, "requests"),
            (self._tokens, limits.tokens_per_minute, "tokens"),
        ):
            if most is not None and used.total >= most:
                raise _refused(
                    f"{used.total:,.0f} {what} in the last minute; {most:,} is the limit of this key",
                    used.seconds_until_below(most),
                )
        self.num_open += 1
        if limits.requests_per_minute is not None:
            self._requests.add(1)

    def use(self, num_tokens: int) -> None:
        """Count tokens that were read or written."""
        if self.limits.tokens_per_minute is not None:
            self._tokens.add(num_tokens)

    def end(self) -> None:
        """Close a request that ``begin`` opened."""
        self.num_open -= 1


def _refused(reason: str, wait_s: float) -> RefusedError:
    retry_after_s = max(1, math.ceil(wait_s))
    return RefusedError(429, f"{reason}; try again in {retry_after_s} s", "rate_limit_exceeded", retry_after_s)
