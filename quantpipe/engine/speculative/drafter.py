"""What guesses tokens ahead, as the scheduler sees it. Knows no blocks and no logits."""

from collections.abc import Callable
from typing import Protocol

from quantpipe.engine.request import Sequence
from quantpipe.engine.speculative.ngram import NgramDrafter


class Drafter(Protocol):
    """Guesses what follows the tokens of sequences: one guess for each place, so that its share is one or nothing.

    The seam for a draft model, which would run its own forward pass in ``propose``, or for Medusa heads, which would
    read hidden states there. Wrong guesses cost time and change no token.
    """

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """For each sequence at most so many tokens of the vocabulary, or none. Called once per step."""
        ...

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended; it may never have been seen."""
        ...


DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
NO_DRAFTER = "none"
