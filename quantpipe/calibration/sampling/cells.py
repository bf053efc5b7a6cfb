"""The rows of one source and stratum, taken in rank order until a target is reached; caps on what a group may give.

Knows tokens only by their number. Where a pool ends before the rows do, ``PoolTooSmallError`` says so: the build then
reads the set again into larger pools, which go on in the same order.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from quantpipe.calibration.rows import Sample
from quantpipe.calibration.sampling.candidates import GROUP_CAP, Candidate, Candidates
from quantpipe.calibration.sampling.pool import Pool
from quantpipe.calibration.sampling.quotas import cut

MIN_CUT_TOKENS = 16
Stratum = tuple[str, ...]


class PoolTooSmallError(Exception):
    """Rows that were turned away from a pool are needed after all."""


@dataclass
class GroupCap:
    """What one group of a source may give. The first row that does not fit is cut to what is left, and closes it."""

    max_tokens: int
    used: dict[str, int] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)

    def take(self, group: str, num_tokens: int) -> int:
        """How many of a row's tokens may be used; 0 where the group is closed, or too little would be left of it."""
        if group in self.closed:
            return 0
        used = self.used.get(group, 0)
        left = self.max_tokens - used
        if num_tokens >= left:
            self.closed.add(group)
        taken = min(num_tokens, left)
        if taken < num_tokens and taken < MIN_CUT_TOKENS and used > 0:
            return 0
        self.used[group] = used + taken
        return taken


class Cell:
    """One pool, and what was taken from it.

    ``chosen`` holds candidates with the number of tokens that may be used of each, ``unit`` at a time where that is not
    1 (a block in which each sample stands alone).
    """

    def __init__(self, source: int, stratum: Stratum, pool: Pool[Sample], unit: int = 1) -> None:
        self.source = source
        self.stratum = stratum
        self.num_rows = pool.num_rows
        self.num_chars = pool.num_chars
        self.chosen: list[tuple[Candidate, int]] = []
        self.num_tokens = 0
        self.num_capped = 0  # of those chosen, how many the cap of their group has cut
        self.cap: GroupCap | None = None
        self._unit = unit
        self._is_whole = pool.limit is None
        self._entries = deque(pool.entries())
        self._group_limits = deque(sorted((rank, group) for group, rank in pool.group_limits.items()))
        self._ready: deque[Candidate] = deque()
        self.is_complete = self._is_whole and not self._group_limits  # whether no row was turned away from the pool

    @property
    def is_exhausted(self) -> bool:
        """Whether every row was looked at."""
        return self.is_complete and not self._entries and not self._ready

    def estimated_tokens(self, candidates: Candidates, num_looked_at: int) -> float:
        """Tokens that the rows of this stratum give, from the first ``num_looked_at`` that pass every check."""
        chars_before = candidates.tallies[self.source].num_chars
        while len(self._ready) < num_looked_at and (candidate := self._next_prepared(candidates)) is not None:
            self._ready.append(candidate)
        num_chars = candidates.tallies[self.source].num_chars - chars_before
        num_tokens = sum(self._usable(candidate) for candidate in self._ready)
        return num_tokens * self.num_chars / num_chars if num_chars else 0.0

    def fill(self, num_tokens: int, candidates: Candidates) -> int:
        """Choose rows until they give ``num_tokens`` or run out; return what they give, at most that."""
        while self.num_tokens < num_tokens and (candidate := self._next(candidates)) is not None:
            taken = self._allowed(candidate, candidates)
            if taken:
                self.chosen.append((candidate, taken))
                self.num_tokens += taken
                self.num_capped += taken < self._usable(candidate)
        return min(self.num_tokens, num_tokens)

    def look_at_rest(self, candidates: Candidates) -> None:
        """Put the rows that were not needed through every check as well, so that the account is exact."""
        while (candidate := self._next(candidates)) is not None:
            self._allowed(candidate, candidates)

    def taken(self, num_tokens: int) -> Iterator[tuple[Candidate, int]]:
        """The candidates that give the first ``num_tokens``, with the tokens used of each: the last may be cut."""
        taken = cut([allowed for _, allowed in self.chosen], num_tokens)
        yield from ((candidate, used) for (candidate, _), used in zip(self.chosen, taken, strict=False))

    def _usable(self, candidate: Candidate) -> int:
        return self._unit if self._unit > 1 else len(candidate.token_ids)

    def _allowed(self, candidate: Candidate, candidates: Candidates) -> int:
        usable = self._usable(candidate)
        if self.cap is None or candidate.group is None:
            return usable
        taken = self.cap.take(candidate.group, usable)
        if not taken:
            candidates.drop_candidate(candidate, GROUP_CAP)
        return taken

    def _next(self, candidates: Candidates) -> Candidate | None:
        return self._ready.popleft() if self._ready else self._next_prepared(candidates)

    def _next_prepared(self, candidates: Candidates) -> Candidate | None:
        while self._entries:
            self._require_below(self._entries[0].rank)
            entry = self._entries.popleft()
            if self._is_closed(entry.group):
                candidates.drop_entry(entry, GROUP_CAP)
            elif (candidate := candidates.prepare(entry)) is not None:
                return candidate
        self._require_below(None)
        if not self._is_whole:
            raise PoolTooSmallError
        return None

    def _require_below(self, rank: int | None) -> None:
        """Raise where the pool lacks a row of lower rank (None: any row) whose group may still give something."""
        while self._group_limits and (rank is None or self._group_limits[0][0] < rank):
            if not self._is_closed(self._group_limits[0][1]):
                raise PoolTooSmallError
            self._group_limits.popleft()

    def _is_closed(self, group: str | None) -> bool:
        return self.cap is not None and group in self.cap.closed
