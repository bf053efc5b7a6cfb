"""Prompt lookup: what followed the latest tokens when they occurred before is guessed to follow again.

After "Prompt Lookup Decoding" (Saxena, 2023): good where the output repeats the prompt or itself, as edits, summaries,
code and tables do. Places are found as in LZ77 compressors: by the last few tokens, then the longest match wins.
"""

from array import array

from quantpipe.engine.request import Sequence

# Less than the first matches by accident, and more than the second says nothing new.
MIN_NGRAM, MAX_NGRAM = 3, 8
# The work of a call: places looked at, and tokens read into the index.
MAX_PLACES = 8
MAX_INDEXED_TOKENS = 1024


class NgramIndex:
    """Where each run of ``min_ngram`` tokens of one sequence occurred. Memory grows with the sequence, time does not.

    A place is the index of the token after a run; of those with the same run each knows the one before it.
    """

    def __init__(self, min_ngram: int = MIN_NGRAM, max_ngram: int = MAX_NGRAM) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier = array("q")

    def propose(self, token_ids: list[int], num_drafts: int) -> tuple[int, ...]:
        """At most ``num_drafts`` tokens to follow ``token_ids``: as at the last call, and perhaps more at the end.

        None while there is no match. Of equally long matches the latest counts.
        """
        self._extend(token_ids)
        if len(token_ids) < self._min_ngram or num_drafts < 1:
            return ()
        place = self._latest.get(tuple(token_ids[-self._min_ngram :]), -1)
        best, best_len = -1, 0
        for _ in range(MAX_PLACES):
            if place < 0 or best_len == self._max_ngram:
                break
            length = self._match_len(token_ids, place)
            if length > best_len:
                best, best_len = place, length
            place = self._earlier[place - self._min_ngram]
        return _copied(token_ids, best, num_drafts) if best >= 0 else ()

    def _extend(self, token_ids: list[int]) -> None:
        """Read new tokens, a bounded number of them: a long prompt takes several calls."""
        first = self._min_ngram + len(self._earlier)
        for place in range(first, min(len(token_ids), first + MAX_INDEXED_TOKENS)):
            run = tuple(token_ids[place - self._min_ngram : place])
            self._earlier.append(self._latest.get(run, -1))
            self._latest[run] = place

    def _match_len(self, token_ids: list[int], place: int) -> int:
        """How many tokens before ``place`` equal the last ones; as many as a run are known to."""
        length = self._min_ngram
        most = min(self._max_ngram, place)
        while length < most and token_ids[place - 1 - length] == token_ids[-1 - length]:
            length += 1
        return length


class NgramDrafter:
    """An index for each sequence."""

    def __init__(self, min_ngram: int = MIN_NGRAM, max_ngram: int = MAX_NGRAM) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._indexes: dict[Sequence, NgramIndex] = {}

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """For each sequence at most so many tokens, or none."""
        return [self._index_of(seq).propose(seq.token_ids, num_drafts) for seq, num_drafts in wanted]

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self._indexes.pop(seq, None)

    def _index_of(self, seq: Sequence) -> NgramIndex:
        index = self._indexes.get(seq)
        if index is None:
            index = self._indexes[seq] = NgramIndex(self._min_ngram, self._max_ngram)
        return index


def _copied(token_ids: list[int], place: int, num: int) -> tuple[int, ...]:
    """``num`` tokens from ``place`` on; where they reach the end, the copy goes on with itself: a period repeats."""
    period = len(token_ids) - place
    return tuple(token_ids[place + offset % period] for offset in range(num))
