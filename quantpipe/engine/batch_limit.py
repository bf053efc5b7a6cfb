"""How many tokens a step may have so that it takes no longer than wanted. Knows times and counts only.

The limit grows slowly and shrinks fast (additive increase, multiplicative decrease, but for small limits): it adapts to
the machine, the model and whatever shares the cores, without a model of any of them.
"""

# A step that took too long shrinks the limit in proportion, within these factors: one outlier does not collapse it.
MOST_SHRINKING, LEAST_SHRINKING = 0.5, 0.9
# In the wanted time of a step, the limit grows by so much of itself, and of its maximum at most.
GROWTH_FRAC = 0.1
MAX_GROWTH_FRAC = 0.01


class BatchLimit:
    """``num_tokens`` is the limit; ``max_tokens`` for ever without a ``target_step_s``."""

    def __init__(self, max_tokens: int, target_step_s: float | None) -> None:
        self._max_tokens = max_tokens
        self._target_step_s = target_step_s
        self._limit = float(max_tokens)
        self._observed_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return max(1, int(self._limit))

    def observe(self, num_tokens: int, step_s: float, now_s: float) -> None:
        """A step of ``num_tokens`` tokens took ``step_s`` and ended at ``now_s``."""
        if self._target_step_s is None:
            return
        if step_s > self._target_step_s:
            factor = min(max(self._target_step_s / step_s, MOST_SHRINKING), LEAST_SHRINKING)
            self._limit = max(1.0, min(self._limit, num_tokens) * factor)
        else:
            # By time and not by steps: idle time counts as well.
            elapsed_s = step_s if self._observed_s is None else now_s - self._observed_s
            num_steps = min(elapsed_s / self._target_step_s, 1 / MAX_GROWTH_FRAC)
            most = self._limit + num_steps * MAX_GROWTH_FRAC * self._max_tokens
            self._limit = min(self._limit * (1 + GROWTH_FRAC) ** num_steps, most, float(self._max_tokens))
        self._observed_s = now_s
