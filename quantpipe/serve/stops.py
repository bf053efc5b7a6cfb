"""Stop strings in a text that arrives in pieces. Knows characters, not tokens."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete; never lets out any part of one.

    The stop string that is complete first wins (of several, the one that began first), so the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: it is then ``stop_string``."""
        return self.stop_string is not None

    def push(self, piece: str, may_stop: bool = True) -> str:
        """The text that is now certain not to belong to a stop string; after a match, the text in front of it.

        Where it may not stop, a stop string that ends in ``piece`` is text like any other.
        """
        text, num_known = self._held + piece, len(self._held)
        self._held = ""
        if self.stopped:
            return ""
        starts = [(text.find(stop, max(0, num_known - len(stop) + 1)), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if matches and may_stop:
            _, start, self.stop_string = min(matches)
            return text[:start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text still held back when no more will come."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest tail of ``text`` that a stop string begins with."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
