"""Which guessed tokens hold. At each place the token is chosen as if nothing had been guessed; equal guesses hold.

That is the rule of speculative sampling (Leviathan, Kalman and Matias 2023, algorithm 1) for a guess d that its drafter
was sure of: a token x drawn from p equals d with probability p(d), and is otherwise distributed as p without d. As x is
the sampler's own, all filters and penalties apply, and a seed gives the same tokens with and without guesses.

Shapes: R rows of logits, V vocabulary.
"""

from dataclasses import dataclass, field

from quantpipe.engine.sampled import Sampled
from quantpipe.engine.sampler import Floats, sample


@dataclass
class Verification:
    """The guesses of one sequence. ``row`` is that of the token before them: the next rows are theirs, in order.

    ``sampled`` is what the next choice depends on. ``chosen`` are the tokens so far, None for a
    place where there was none to choose.
    """

    draft_ids: tuple[int, ...]
    row: int
    sampled: Sampled
    chosen: list[int | None] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the next place is still to be chosen: all guesses before it hold."""
        num = len(self.chosen)
        return num == 0 or (num <= len(self.draft_ids) and self.chosen[-1] == self.draft_ids[num - 1])

    @property
    def num_accepted(self) -> int:
        """How many guesses hold, once it is closed."""
        return len(self.chosen) - 1


def verify(logits_RV: Floats, verifications: list[Verification]) -> None:
    """Choose tokens until one is not what was guessed, place by place for all of them at once.

    Nothing is chosen from rows behind a wrong guess: whatever they hold, they are no concern of the sequence.
    """
    while open_ones := [own for own in verifications if own.is_open]:
        rows = [own.row + len(own.chosen) for own in open_ones]
        for own in open_ones:
            if own.chosen:
                own.sampled = own.sampled.after([own.draft_ids[len(own.chosen) - 1]])
        for own, token_id in zip(open_ones, sample(logits_RV[rows], [own.sampled for own in open_ones]), strict=True):
            own.chosen.append(token_id)
