"""Which sequences of a step read guesses too, and how many: as far as tokens and blocks that nobody else needs go.

Blocks that hold guesses only are given back before the next step is planned, so that they never cost anybody a place.
Knows no logits, and not how guesses are made.
"""

from quantpipe.engine.block_tables import BlockTables
from quantpipe.engine.request import Sequence
from quantpipe.engine.speculative.draft_length import DraftLength
from quantpipe.engine.speculative.drafter import Drafter
from quantpipe.engine.step import Advance


class Drafting:
    """At most ``num_draft_tokens`` guesses for each sequence that decodes, fewer where they prove wrong."""

    def __init__(self, drafter: Drafter, num_draft_tokens: int, tables: BlockTables) -> None:
        self._drafter = drafter
        self._num_draft_tokens = num_draft_tokens
        self._tables = tables
        self._lengths: dict[Sequence, DraftLength] = {}
        self._holding: list[Sequence] = []

    def extend(self, advances: list[Advance], num_room: int) -> None:
        """Add guesses, ``num_room`` tokens at most, to what sequences read in a step, whoever comes first first."""
        places, wanted = [], []
        for place, advance in enumerate(advances):
            num = min(self._num_wanted(advance), num_room)
            if num > 0:
                places.append(place)
                wanted.append((advance.seq, num))
        if not wanted:
            return
        for place, (seq, num), proposed in zip(places, wanted, self._drafter.propose(wanted), strict=True):
            draft_ids = proposed[: min(num, num_room)]
            if draft_ids:
                self._holding.append(seq)
                draft_ids = draft_ids[: self._tables.reserve(seq, len(draft_ids))]
            if draft_ids:
                num_tokens = 1 + len(draft_ids)
                advances[place] = Advance(seq, advances[place].start, num_tokens, num_tokens, draft_ids)
                num_room -= len(draft_ids)

    def take_back(self) -> None:
        """The blocks of guesses that came to nothing, also of a step that was never computed."""
        for seq in self._holding:
            self._tables.trim(seq)
        self._holding.clear()

    def observe(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Of the guesses that ``seq`` read, the first ``num_accepted`` are its tokens now."""
        self._lengths[seq].observe(num_drafted, num_accepted)

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self._lengths.pop(seq, None)
        self._drafter.forget(seq)

    def _num_wanted(self, advance: Advance) -> int:
        """Only who decodes is guessed for: whose prompt is being read has rows of its own, or forks to come."""
        seq = advance.seq
        is_decoding = advance.start >= seq.num_prompt_tokens and advance.start == seq.num_tokens - 1
        if not is_decoding or not seq.takes_drafts:
            return 0
        # The last token is only chosen, never read.
        num_left = seq.request.params.max_tokens - seq.num_generated_tokens - 1
        if num_left < 1:
            return 0
        length = self._lengths.get(seq)
        if length is None:
            length = self._lengths[seq] = DraftLength(self._num_draft_tokens)
        return min(num_left, length.next())
