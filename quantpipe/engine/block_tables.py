"""The blocks of each sequence: found in the prefix cache, taken from the pool, shared, copied, given back.

Where every layer has a window, a table holds the sink blocks and those that tokens to come can still see. Of what was
not found and will be out of sight by the time it would matter, nothing is read: so a sequence that comes back from
preemption reads its sinks again, and behind them no more than what can have any influence, however long it is.

Knows one sequence at a time, and nothing of who comes first.
"""

from typing import NamedTuple

from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import Sequence


class Found(NamedTuple):
    """What is known of a sequence that is to begin: ``held`` blocks are of use, ``passed`` ones behind its window."""

    held: list[int]
    passed: list[int]


class BlockTables:
    """Changes ``block_table`` of sequences, and where they stand. Without ``prefix_cache`` none finds what another
    computed."""

    def __init__(self, pool: BlockPool, window: AttentionWindow, prefix_cache: PrefixCache | None) -> None:
        self.pool = pool
        self.window = window
        self.block_size = window.block_size
        self.prefix_cache = prefix_cache
        self._sharing: set[Sequence] = set()  # they may share the block that they write into next

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def place(self, seq: Sequence) -> Found:
        """Look up what is there of a sequence that has no blocks, and let it stand where it would begin to read."""
        hits: list[int] = []
        if self.prefix_cache is not None:
            # Logits of scored positions are computed once; what was delivered of them may be found.
            max_tokens = seq.num_settled_tokens if seq.request.is_scored else None
            hits = self.prefix_cache.match(seq.token_ids, seq.namespace, max_tokens)
        num_computed, num_sinks = len(hits) * self.block_size, self.window.num_sink_blocks
        first = self.window.first_needed(self._first_wanted(seq))
        if num_computed >= first:
            seq.num_computed_tokens = num_computed
            seq.num_dropped_blocks = self.window.num_dropped(num_computed)
        elif len(hits) >= num_sinks:
            seq.num_computed_tokens, seq.num_dropped_blocks = first, first // self.block_size - num_sinks
        else:
            seq.num_computed_tokens, seq.gap = num_computed, (num_sinks * self.block_size, first)
        num_passed = num_sinks + seq.num_dropped_blocks
        return Found(hits[:num_sinks] + hits[num_passed:], hits[num_sinks:num_passed])

    def withdraw(self, seq: Sequence) -> None:
        """Undo ``place``."""
        seq.num_computed_tokens, seq.num_dropped_blocks, seq.gap = 0, 0, None

    def begin(self, seq: Sequence, found: Found) -> None:
        """Give a placed sequence what was found of it, and blocks for what it reads next."""
        hits = found.held + found.passed
        self.pool.share(hits)  # first, or they could be evicted for the new ones
        self.pool.release(found.passed)  # of use until now: others may look for them
        seq.block_table += found.held
        seq.block_table += self.pool.allocate(self._num_lacking(seq))
        seq.num_shared_blocks, num_hit_tokens = len(found.held), len(hits) * self.block_size
        if seq.num_seen_tokens > 0:
            return
        seq.num_cached_tokens = num_hit_tokens
        if self.prefix_cache is not None:
            num_query_tokens = seq.num_settled_tokens if seq.request.is_scored else seq.num_prompt_tokens
            self.prefix_cache.record(num_query_tokens, num_hit_tokens)

    def is_ready(self, seq: Sequence) -> bool:
        """Whether ``seq`` has blocks for all its tokens, none of which it may not write."""
        num_blocks = seq.num_dropped_blocks + len(seq.block_table)
        return len(seq.token_ids) <= num_blocks * self.block_size and seq not in self._sharing

    def num_missing(self, seq: Sequence) -> int:
        """How many blocks ``extend`` takes from the pool."""
        return self._num_lacking(seq) + (seq in self._sharing and self._must_copy(seq))

    def extend(self, seq: Sequence) -> tuple[int, int] | None:
        """Give ``seq`` blocks for what it may read next; returns (source, destination) of a copy that it needs before.

        That is where the block it writes into next is shared. Later blocks are always its own.
        """
        copy = None
        if seq in self._sharing:
            self._sharing.remove(seq)
            if self._must_copy(seq):
                copy = self.pool.make_writable(seq.block_table, self._next_index(seq))
        num_more = self._num_lacking(seq)
        if num_more > 0:
            seq.block_table += self.pool.allocate(num_more)
        return copy

    def reserve(self, seq: Sequence, num_ahead: int) -> int:
        """Give a ready ``seq`` blocks for up to ``num_ahead`` tokens behind its own: how many there is room for."""
        num_more = self.num_blocks(seq.num_tokens + num_ahead) - seq.num_dropped_blocks - len(seq.block_table)
        if num_more > 0:
            seq.block_table += self.pool.allocate(min(num_more, self.pool.num_available))
        num_blocks = seq.num_dropped_blocks + len(seq.block_table)
        return min(num_ahead, num_blocks * self.block_size - seq.num_tokens)

    def trim(self, seq: Sequence) -> None:
        """Take back blocks behind all tokens of ``seq``."""
        num_blocks = self.num_blocks(seq.num_tokens) - seq.num_dropped_blocks
        self.pool.release(seq.block_table[num_blocks:])
        del seq.block_table[num_blocks:]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` begin with what was computed of ``parent``."""
        child.num_computed_tokens = child.num_seen_tokens = parent.num_computed_tokens
        child.num_dropped_blocks = parent.num_dropped_blocks
        num_blocks = self.num_blocks(parent.num_computed_tokens) - parent.num_dropped_blocks
        child.block_table = parent.block_table[:num_blocks]
        child.num_shared_blocks = self._next_index(parent)
        self.pool.share(child.block_table)
        self._sharing |= {parent, child}

    def register(self, seq: Sequence, num_computed: int, has_failed: bool) -> None:
        """Blocks of ``seq`` were filled, to be found by others; or, where it failed, not.

        Nor are those that follow blocks let go: what a prefix is kept for is to be found from its beginning.
        """
        if self.prefix_cache is None:
            return
        if has_failed:
            self.prefix_cache.forget(seq.block_table)
        elif seq.num_dropped_blocks == 0:
            self.prefix_cache.register(seq.block_table, seq.token_ids, num_computed, seq.namespace)

    def free(self, seq: Sequence) -> None:
        """Take everything back: nothing of it is computed any more."""
        self.pool.release(seq.block_table)
        seq.block_table.clear()
        self.withdraw(seq)
        seq.num_shared_blocks = 0
        self._sharing.discard(seq)

    def let_go(self, seq: Sequence) -> None:
        """Give back the blocks that no token to come can see, and pass over what need not be read."""
        if seq.gap is not None and seq.num_computed_tokens == seq.gap[0]:
            seq.num_computed_tokens, seq.gap = seq.gap[1], None
            seq.num_dropped_blocks = seq.num_computed_tokens // self.block_size - len(seq.block_table)
        num_more = self.window.num_dropped(seq.num_computed_tokens) - seq.num_dropped_blocks
        if num_more <= 0:
            return
        first = self.window.num_sink_blocks
        self.pool.release(seq.block_table[first : first + num_more])
        del seq.block_table[first : first + num_more]
        seq.num_dropped_blocks += num_more
        seq.num_shared_blocks -= max(0, min(seq.num_shared_blocks - first, num_more))

    def _must_copy(self, seq: Sequence) -> bool:
        offset = seq.num_computed_tokens % self.block_size
        return offset > 0 and self.pool.must_copy(seq.block_table[self._next_index(seq)])

    def _next_index(self, seq: Sequence) -> int:
        """Where in its table the block is that the next token is written into."""
        return seq.num_computed_tokens // self.block_size - seq.num_dropped_blocks

    def _num_lacking(self, seq: Sequence) -> int:
        """How many blocks are missing behind those it has."""
        end = seq.num_tokens
        if self.window.is_bounded:  # a long prompt lets go of blocks as it is read
            end = min(end, seq.num_computed_tokens + self.window.max_chunk)
            end = end if seq.gap is None else min(end, seq.gap[0])
        return max(0, self.num_blocks(end) - seq.num_dropped_blocks - len(seq.block_table))

    def _first_wanted(self, seq: Sequence) -> int:
        """The first position whose logits, or those of a later one, are wanted."""
        last = seq.num_tokens - 1
        return min(last, seq.num_settled_tokens) if seq.request.is_scored else last
