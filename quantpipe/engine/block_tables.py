"""The blocks of each sequence: found in the prefix cache, taken from the pool, shared, copied, given back.

Knows one sequence at a time, and nothing of who comes first.
"""

from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import Sequence


class BlockTables:
    """Changes ``block_table`` of sequences. Without ``prefix_cache`` none finds what another computed."""

    def __init__(self, pool: BlockPool, block_size: int, prefix_cache: PrefixCache | None) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._sharing: set[Sequence] = set()  # they may share the block that they write into next

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find(self, seq: Sequence) -> list[int]:
        """The blocks that hold the beginning of ``seq`` already."""
        if self.prefix_cache is None:
            return []
        # Logits of scored positions are computed once; what was delivered of them may be found.
        max_tokens = seq.num_settled_tokens if seq.request.is_scored else None
        return self.prefix_cache.match(seq.token_ids, seq.namespace, max_tokens)

    def begin(self, seq: Sequence, hits: list[int]) -> None:
        """Give a sequence that has none the blocks of all its tokens, the first of which were found."""
        num_hit_tokens = len(hits) * self.block_size
        self.pool.share(hits)  # first, or they could be evicted for the new ones
        seq.block_table += hits + self.pool.allocate(self.num_blocks(seq.num_tokens) - len(hits))
        seq.num_computed_tokens, seq.num_shared_blocks = num_hit_tokens, len(hits)
        if seq.num_seen_tokens > 0:
            return
        seq.num_cached_tokens = num_hit_tokens
        if self.prefix_cache is not None:
            num_query_tokens = seq.num_settled_tokens if seq.request.is_scored else seq.num_prompt_tokens
            self.prefix_cache.record(num_query_tokens, num_hit_tokens)

    def is_ready(self, seq: Sequence) -> bool:
        """Whether ``seq`` has blocks for all its tokens, none of which it may not write."""
        return len(seq.token_ids) <= len(seq.block_table) * self.block_size and seq not in self._sharing

    def num_missing(self, seq: Sequence) -> int:
        """How many blocks ``extend`` takes from the pool."""
        num_more = max(0, self.num_blocks(seq.num_tokens) - len(seq.block_table))
        return num_more + (seq in self._sharing and self._must_copy(seq))

    def extend(self, seq: Sequence) -> tuple[int, int] | None:
        """Give ``seq`` blocks for all of its tokens; returns (source, destination) of a copy that it needs before.

        That is where the block it writes into next is shared. Later blocks are always its own.
        """
        copy = None
        if seq in self._sharing:
            self._sharing.remove(seq)
            if self._must_copy(seq):
                copy = self.pool.make_writable(seq.block_table, seq.num_computed_tokens // self.block_size)
        num_more = self.num_blocks(seq.num_tokens) - len(seq.block_table)
        if num_more > 0:
            seq.block_table += self.pool.allocate(num_more)
        return copy

    def reserve(self, seq: Sequence, num_ahead: int) -> int:
        """Give a ready ``seq`` blocks for up to ``num_ahead`` tokens behind its own: how many there is room for."""
        num_more = self.num_blocks(seq.num_tokens + num_ahead) - len(seq.block_table)
        if num_more > 0:
            seq.block_table += self.pool.allocate(min(num_more, self.pool.num_available))
        return min(num_ahead, len(seq.block_table) * self.block_size - seq.num_tokens)

    def trim(self, seq: Sequence) -> None:
        """Take back blocks behind all tokens of ``seq``."""
        num_blocks = self.num_blocks(seq.num_tokens)
        self.pool.release(seq.block_table[num_blocks:])
        del seq.block_table[num_blocks:]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` begin with what was computed of ``parent``."""
        child.num_computed_tokens = child.num_seen_tokens = parent.num_computed_tokens
        child.block_table = parent.block_table[: self.num_blocks(parent.num_computed_tokens)]
        child.num_shared_blocks = parent.num_computed_tokens // self.block_size
        self.pool.share(child.block_table)
        self._sharing |= {parent, child}

    def register(self, seq: Sequence, num_computed: int, has_failed: bool) -> None:
        """Blocks of ``seq`` were filled, to be found by others; or, where it failed, not."""
        if self.prefix_cache is None:
            return
        if has_failed:
            self.prefix_cache.forget(seq.block_table)
        else:
            self.prefix_cache.register(seq.block_table, seq.token_ids, num_computed, seq.namespace)

    def free(self, seq: Sequence) -> None:
        """Take everything back: nothing of it is computed any more."""
        self.pool.release(seq.block_table)
        seq.block_table.clear()
        seq.num_computed_tokens = 0
        seq.num_shared_blocks = 0
        self._sharing.discard(seq)

    def _must_copy(self, seq: Sequence) -> bool:
        index, offset = divmod(seq.num_computed_tokens, self.block_size)
        return offset > 0 and self.pool.must_copy(seq.block_table[index])
