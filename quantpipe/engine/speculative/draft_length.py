"""How far ahead one sequence is guessed: less where guesses prove wrong. Knows counts only."""

# Steps without a guess after the second miss in a row, doubled with each further one up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 1, 16


class DraftLength:
    """At most ``most`` tokens at a time, which is also how it begins.

    It doubles where all proved right, and is one more than what did where not all. Steps in which none did, one after
    another, make pauses between tries longer.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num = most
        self._num_misses = 0
        self._num_pauses = 0

    def next(self) -> int:
        """How many tokens to guess in this step."""
        if self._num_pauses > 0:
            self._num_pauses -= 1
            return 0
        return self._num

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Of ``num_drafted`` guesses, at least one, the first ``num_accepted`` proved right."""
        if num_accepted == num_drafted:
            self._num = min(self._most, max(self._num, 2 * num_drafted))
        else:
            self._num = min(self._most, num_accepted + 1)
        if num_accepted > 0:
            self._num_misses = 0
            return
        self._num_misses += 1
        if self._num_misses > 1:
            self._num_pauses = min(FIRST_PAUSE << (self._num_misses - 2), LONGEST_PAUSE)
