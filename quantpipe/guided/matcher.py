"""One sequence on its way through a grammar, by a matcher of llguidance.

Shapes: V vocabulary.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

# A grammar of nothing but a reference to itself: llguidance's word for a text that can never be completed.
NO_EXTENSION = "NoExtensionBias"
MAX_REASON_CHARS = 300


class GrammarMatcher:
    """Wraps an ``llguidance.LLMatcher``, which reports no failure by an exception but stays in it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def failure(self) -> str | None:
        if not self._matcher.is_error():
            return None
        reason = one_line(str(self._matcher.get_error())) or "it cannot go on"
        return "no text obeys it" if reason.startswith(NO_EXTENSION) else reason

    def allowed_V(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            return np.zeros(vocab_size, dtype=np.bool_)
        allowed_V = np.zeros(vocab_size, dtype=np.bool_)
        known = np.unpackbits(bits, count=min(vocab_size, 8 * len(bits)), bitorder="little")
        allowed_V[: len(known)] = known
        return allowed_V

    def append(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def copy(self) -> "GrammarMatcher":
        return GrammarMatcher(self._matcher.deep_copy())


def one_line(text: str) -> str:
    """What llguidance says, with its drawing of the place, as one line of bounded length."""
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON_CHARS else line[:MAX_REASON_CHARS] + " ..."
