"""Which KV blocks are free, which are held by sequences, and which keep the content of a prefix that nobody holds.

Knows block ids; no tensors or tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1. Every operation takes constant time per block.

    A block is held while its references are above 0. When the last one is dropped it is free, or cached where
    ``keep`` was called for it: its content stays until the space is needed.
    Invariant: ``num_free + num_cached + num_held == num_blocks``.

    ``on_evict`` is called with each cached block that ``allocate`` takes for new content.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = _ignore
        # A stack whose top is the block freed last: the memory in use stays small, and a fresh pool gives 0, 1, 2 ...
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_references = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._num_held = 0  # counted by itself, so that the invariant says something

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_available(self) -> int:
        """How many blocks ``allocate`` can give."""
        return len(self._free) + len(self._cached)

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def allocate(self, num: int) -> list[int]:
        """Take ``num`` blocks, each referenced once: free ones, then the cached ones that were unused for longest.

        All or nothing: ValueError where fewer are available.
        """
        if not 0 <= num <= self.num_available:
            raise ValueError(f"{num} blocks asked of a pool with {self.num_available} available")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num)]
        for block in blocks:
            self._num_references[block] = 1
        self._num_held += num
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Reference held or cached blocks once more, for another sequence with the same prefix."""
        for block in blocks:
            if self._num_references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._cached[block]
                self._num_held += 1
            self._num_references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference to each block of a table, last first.

        So the next table repeats the order of free blocks, and the tail of a prefix is evicted before its head.
        """
        for block in reversed(blocks):
            if self._num_references[block] == 0:
                raise ValueError(f"block {block} is released but was not held")
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._num_held -= 1
                if self._is_kept[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """The content of a held block is worth keeping once nobody holds it. It may not be written any more."""
        if self._num_references[block] == 0:
            raise ValueError(f"block {block} is not held: its content may be gone already")
        self._is_kept[block] = True

    def discard(self, block: int) -> None:
        """The content of a block is of no use any more: if nobody holds it, it is free."""
        self._is_kept[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def must_copy(self, block: int) -> bool:
        """Whether a sequence that holds ``block`` may not write into it: others read it, or its content is kept."""
        return self._num_references[block] > 1 or bool(self._is_kept[block])

    def make_writable(self, table: list[int], index: int) -> tuple[int, int] | None:
        """Give a table a block of its own at ``index``; returns (source, destination) of the copy that it needs.

        None where the block may be written as it is. The copies of a step must be carried out before its writes: the
        source may change hands as soon as its other holders let go. ValueError where no block is available.
        """
        source = table[index]
        if not self.must_copy(source):
            return None
        [table[index]] = self.allocate(1)
        self.release([source])
        return source, table[index]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._is_kept[block] = False
        self.on_evict(block)
        return block


def _ignore(block: int) -> None:
    """Nobody wants to know."""
