"""The candidates of one stratum: of all rows offered, those of lowest rank, as many as its size allows.

A rank is a keyed hash of a row's text, so a pool is a beginning of one fixed random order of the distinct rows: which
rows it holds does not depend on the order they came in, and a larger pool only goes on where a smaller one ends.
Rows of equal text have equal rank and are held once. Knows neither tokens nor what a sample is.
"""

import hashlib
import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
RANK_BYTES = 16
ENTRY_CHARS = 64  # what an entry costs beside its text


def ranking(seed: int) -> Callable[[str], int]:
    """The random order that follows from ``seed``: a function from a row's text to its rank."""
    keyed = hashlib.blake2b(digest_size=RANK_BYTES, key=f"order {seed}".encode())

    def rank(text: str) -> int:
        digest = keyed.copy()
        digest.update(text.encode("utf-8", "surrogatepass"))
        return int.from_bytes(digest.digest(), "big")

    return rank


@dataclass(slots=True)
class Entry(Generic[Item]):
    """One distinct row: the first that came with its text, and how many there were in all."""

    rank: int
    item: Item
    num_chars: int
    group: str | None = None
    num_copies: int = 1


@dataclass(slots=True)
class _Group:
    worst_first: list[int] = field(default_factory=list)  # heap of negated ranks
    num_chars: int = 0


class Pool(Generic[Item]):
    """The rows of lowest rank, up to ``max_chars`` (one row always), of which one group may give ``max_group_chars``.

    ``limit`` is the lowest rank that was turned away: below it the pool is complete but for the groups in
    ``group_limits``, where the same holds for a group's own rows.
    """

    def __init__(self, max_chars: int, max_group_chars: int | None = None) -> None:
        self.limit: int | None = None
        self.num_rows = 0
        self.num_chars = 0
        self._max_chars = max_chars
        self._max_group_chars = max_group_chars
        self._entries: dict[int, Entry[Item]] = {}
        self._worst_first: list[int] = []
        self._num_held_chars = 0
        self._groups: dict[str, _Group] = {}
        self._group_limits: dict[str, int] = {}

    def offer(self, rank: int, item: Item, num_chars: int, group: str | None = None) -> None:
        """Count one row; keep it while it is among those of lowest rank."""
        self.num_rows += 1
        self.num_chars += num_chars
        if self.limit is not None and rank >= self.limit:
            return
        held = self._entries.get(rank)
        if held is not None:
            held.num_copies += 1
            return
        if self._max_group_chars is None:
            group = None
        if group is not None and rank >= self._group_limits.get(group, rank + 1):
            return
        self._add(Entry(rank, item, num_chars, group))
        if group is not None and self._max_group_chars is not None:
            self._shrink_group(group, self._max_group_chars)
        self._shrink()

    def absorb(self, other: "Pool[Item]") -> None:
        """Take over what another pool of this size, without groups, holds and has counted."""
        for entry in other.entries():
            held = self._entries.get(entry.rank)
            if held is not None:
                held.num_copies += entry.num_copies
            elif self.limit is None or entry.rank < self.limit:
                self._add(entry)
        self.num_rows += other.num_rows
        self.num_chars += other.num_chars
        if other.limit is not None:
            self.limit = other.limit if self.limit is None else min(self.limit, other.limit)
            for rank in [rank for rank in self._entries if rank >= self.limit]:
                self._remove(rank)
        self._shrink()

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry[Item]]:
        """What is held, lowest rank first."""
        return [self._entries[rank] for rank in sorted(self._entries)]

    @property
    def group_limits(self) -> Mapping[str, int]:
        """For each group of which rows below ``limit`` were turned away, the lowest rank of those."""
        return {group: rank for group, rank in self._group_limits.items() if self.limit is None or rank < self.limit}

    def _add(self, entry: Entry[Item]) -> None:
        self._entries[entry.rank] = entry
        heapq.heappush(self._worst_first, -entry.rank)
        self._num_held_chars += entry.num_chars + ENTRY_CHARS
        if entry.group is not None:
            group = self._groups.setdefault(entry.group, _Group())
            heapq.heappush(group.worst_first, -entry.rank)
            group.num_chars += entry.num_chars + ENTRY_CHARS

    def _shrink(self) -> None:
        while self._num_held_chars > self._max_chars and len(self._entries) > 1:
            rank = -heapq.heappop(self._worst_first)
            if rank in self._entries:  # otherwise its group let it go before
                self._remove(rank)
                self.limit = rank

    def _shrink_group(self, name: str, max_chars: int) -> None:
        group = self._groups[name]
        while group.num_chars > max_chars and len(group.worst_first) > 1:
            rank = -group.worst_first[0]
            self._remove(rank)
            self._group_limits[name] = rank
        if len(self._group_limits) > 2 * len(self._entries) + ENTRY_CHARS:  # forget those that `limit` covers
            self._group_limits = dict(self.group_limits)

    def _remove(self, rank: int) -> None:
        entry = self._entries.pop(rank)
        self._num_held_chars -= entry.num_chars + ENTRY_CHARS
        if entry.group is None:
            return
        group = self._groups[entry.group]
        heapq.heappop(group.worst_first)  # a pool and a group both let go of their highest rank first
        group.num_chars -= entry.num_chars + ENTRY_CHARS
        if not group.worst_first:
            del self._groups[entry.group]
