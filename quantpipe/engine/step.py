"""What one step computes, as the scheduler hands it to the runner, and what it may spend. Knows no order or blocks."""

from dataclasses import dataclass
from typing import NamedTuple

from quantpipe.engine.request import Sequence


class Advance(NamedTuple):
    """Sequence ``seq`` reads its tokens ``start .. start + num_tokens``; the logits of the last few are wanted.

    ``draft_ids`` are guesses of what follows its own tokens. They are the last of ``num_tokens``, and a row of logits
    is wanted for each of them and for the token before them: as many may be chosen as prove right, and one more. Only a
    sequence that decodes has any.
    """

    seq: Sequence
    start: int
    num_tokens: int
    num_logit_rows: int
    draft_ids: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def has_sample(self) -> bool:
        """Whether every token is now read, so that the last rows choose new ones."""
        num_own = self.start + self.num_tokens - len(self.draft_ids)
        return num_own == self.seq.num_tokens and self.seq.request.params.max_tokens > 0


@dataclass(frozen=True)
class Step:
    """What to compute next, first in order first. Empty when there is nothing to do.

    ``copies`` of whole blocks (source, destination) come first, before any key or value is written: their sources are
    shared and may change hands. All sources are read as they were before the step; no destination occurs twice.

    ``wait_s`` is how long an empty step is to be waited for, unless more arrives: nothing may start earlier.
    """

    advances: tuple[Advance, ...]
    copies: tuple[tuple[int, int], ...] = ()
    wait_s: float = 0.0


@dataclass
class Budget:
    """What a step may still spend: tokens to read, and rows of prompt logits to keep.

    ``max_chunk`` is the most that one sequence may read.
    """

    num_tokens: int
    num_scored_rows: int
    max_chunk: int

    def take(self, seq: Sequence) -> int:
        """How many tokens ``seq`` may read, and pay for them."""
        num = min(seq.num_uncomputed_tokens, self.num_tokens, self.max_chunk)
        if seq.gap is not None:
            num = min(num, seq.gap[0] - seq.num_computed_tokens)
        if seq.request.is_scored and seq.num_settled_tokens < seq.num_prompt_tokens:
            num_known = seq.num_settled_tokens - seq.num_computed_tokens  # not wanted, or read again: no rows
            num = min(num, num_known + self.num_scored_rows)
            self.num_scored_rows -= max(0, num - num_known)
        self.num_tokens -= num
        return num


def advance_of(seq: Sequence, num_tokens: int) -> Advance:
    """The next ``num_tokens`` of ``seq``, with the rows of logits that it wants of them."""
    start = seq.num_computed_tokens
    end = start + num_tokens
    num_rows = 1 if end == seq.num_tokens and seq.request.params.max_tokens > 0 else 0
    if seq.request.is_scored:
        num_rows = max(num_rows, min(end, seq.num_prompt_tokens) - max(start, seq.num_settled_tokens))
    return Advance(seq, start, num_tokens, num_rows)
