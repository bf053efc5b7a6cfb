"""Which KV blocks are free and how many sequences hold each of the others. Knows block ids, no tensors or tokens."""

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1. Every operation takes constant time per block.

    Invariant: ``num_free + num_held == num_blocks``; a block is free exactly when nobody references it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        # A stack whose top is the block freed last: the memory in use stays small, and a fresh pool gives 0, 1, 2 ...
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free)

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def allocate(self, num: int) -> list[int]:
        """Take ``num`` free blocks, each referenced once. All or nothing: ValueError where fewer are free."""
        if not 0 <= num <= len(self._free):
            raise ValueError(f"{num} blocks asked of a pool with {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(num)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Reference held blocks once more, for another sequence with the same prefix."""
        for block in blocks:
            if self._num_references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._num_references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference to each block of a table, last first, so that the next table repeats their order."""
        for block in reversed(blocks):
            if self._num_references[block] == 0:
                raise ValueError(f"block {block} is released but was not held")
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._free.append(block)
