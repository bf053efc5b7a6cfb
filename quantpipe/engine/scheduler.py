"""Which sequences advance in the next step, and by how many tokens. Knows blocks, not tensors.

There are no phases: a step has one budget of tokens, and a sequence gets as many as it still has to read: one where
it decodes, a chunk where it reads a prompt or comes back from preemption.

1. Running sequences first: those that decode get their one token each, the others share what is left, oldest first.
   A long prompt therefore delays a decode by one step of at most the budget.
2. Blocks are given oldest first. Where none is left, the youngest running sequence gives all of its back and will
   recompute them later. The oldest is never the victim while others run, so it always ends.
3. Waiting sequences are admitted in the order of arrival, each with blocks for all of its tokens. What the prefix
   cache knows of them, they need not read: a preempted sequence mostly finds its own blocks again.

Running sequences are always older than waiting ones, and both lists are in the order of arrival.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import Sequence
from quantpipe.errors import RequestError


class Advance(NamedTuple):
    """Sequence ``seq`` reads its tokens ``start .. start + num_tokens``; the logits of the last few are wanted.

    ``draft_ids`` are guesses of what follows its own tokens. They are the last of ``num_tokens``, and a row of logits
    is wanted for each of them and for the token before them: as many may be chosen as prove right, and one more.
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
        seq = self.seq
        return (
            self.start + self.num_tokens - len(self.draft_ids) == seq.num_tokens and seq.request.params.max_tokens > 0
        )


@dataclass(frozen=True)
class Step:
    """What to compute next, first in order first. Empty when there is nothing to do.

    ``copies`` of whole blocks (source, destination) come first, before any key or value is written: their sources are
    shared and may change hands. All sources are read as they were before the step; no destination occurs twice.
    """

    advances: tuple[Advance, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass
class _Budget:
    """What a step may still spend: tokens to read, and rows of prompt logits to keep."""

    num_tokens: int
    num_scored_rows: int

    def take(self, seq: Sequence) -> int:
        """How many tokens ``seq`` may read, and pay for them."""
        num = min(seq.num_uncomputed_tokens, self.num_tokens)
        if seq.request.is_scored and seq.num_seen_tokens < seq.num_prompt_tokens:
            num_known = seq.num_seen_tokens - seq.num_computed_tokens  # read again after preemption: no rows
            num = min(num, num_known + self.num_scored_rows)
            self.num_scored_rows -= max(0, num - num_known)
        self.num_tokens -= num
        return num


class Scheduler:
    """The queue of waiting sequences, the running ones, and the blocks they hold. Without ``prefix_cache`` none share.

    ``max_scored_rows`` bounds the prompt positions per step whose logits are wanted, as each is a vocabulary wide.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_scored_rows: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_scored_rows = max_scored_rows
        self.prefix_cache = prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. RequestError where the whole pool could not hold it."""
        # The last token is chosen but never read, so it needs no room.
        num_tokens = seq.num_prompt_tokens + max(0, seq.request.params.max_tokens - 1)
        if self._num_blocks(num_tokens) > self.pool.num_blocks:
            raise RequestError(
                f"prompt: {num_tokens:,} tokens with max_tokens need {self._num_blocks(num_tokens):,} KV blocks and "
                f"there are {self.pool.num_blocks:,}; shorten it or raise engine.num_kv_blocks",
                "prompt",
            )
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence that ended or was aborted, in whatever state it is, and free what it holds."""
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self._free(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` run beside ``parent``, whose computed tokens it begins with: it shares the blocks of those.

        Call after ``commit``. The slot for it was kept free since ``parent`` was admitted: one of its
        ``num_pending_forks``.
        """
        parent.num_pending_forks -= 1
        child.num_computed_tokens = child.num_seen_tokens = parent.num_computed_tokens
        child.block_table = parent.block_table[: self._num_blocks(parent.num_computed_tokens)]
        self.pool.share(child.block_table)
        self.running.insert(self.running.index(parent) + 1, child)

    def schedule(self) -> Step:
        """Choose the next step and allocate its blocks. Nothing advances until ``commit``."""
        budget = _Budget(self.max_num_batched_tokens, self.max_scored_rows)
        shares = self._share(budget)
        num_preemptions = self.num_preemptions
        advances: list[Advance] = []
        copies: dict[Sequence, tuple[int, int]] = {}
        index = 0
        while index < len(self.running):  # the list loses its tail where younger sequences are preempted
            seq = self.running[index]
            if shares[seq] and self._grow(seq, copies):
                advances.append(_advance(seq, shares[seq]))
            index += 1
        if self.num_preemptions == num_preemptions:
            advances += self._admit(budget)
        return Step(tuple(advances), tuple(copies.values()))

    def commit(self, step: Step, failed: Collection[Sequence] = ()) -> None:
        """The step was computed: its keys and values are in the cache, to be shared but for those of ``failed``."""
        for advance in step.advances:
            seq = advance.seq
            seq.num_computed_tokens = advance.end
            seq.num_seen_tokens = max(seq.num_seen_tokens, advance.end)
            if self.prefix_cache is None:
                continue
            if seq in failed:
                self.prefix_cache.forget(seq.block_table)
            elif advance.start // self.block_size < advance.end // self.block_size:  # a block became full
                self.prefix_cache.register(seq.block_table, seq.token_ids, advance.end, seq.namespace)

    def _share(self, budget: _Budget) -> dict[Sequence, int]:
        decoding = [seq for seq in self.running if seq.num_uncomputed_tokens == 1]
        reading = [seq for seq in self.running if seq.num_uncomputed_tokens > 1]
        return {seq: budget.take(seq) for seq in decoding + reading}

    def _grow(self, seq: Sequence, copies: dict[Sequence, tuple[int, int]]) -> bool:
        """Give ``seq`` blocks for all of its tokens, preempting younger ones; False where it was itself preempted.

        Where the block it writes into next is shared, it gets a copy.
        """
        num_missing = self._num_blocks(seq.num_tokens) - len(seq.block_table)
        while num_missing + self._must_copy(seq) > self.pool.num_available:
            victim = self.running.pop()
            self._free(victim)
            copies.pop(victim, None)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is seq:
                return False
        if self._must_copy(seq):
            copy = self.pool.make_writable(seq.block_table, seq.num_computed_tokens // self.block_size)
            assert copy is not None
            copies[seq] = copy
        seq.block_table += self.pool.allocate(num_missing)
        return True

    def _must_copy(self, seq: Sequence) -> bool:
        """Whether the next token goes into a block that others read too. Later blocks are always its own."""
        index, offset = divmod(seq.num_computed_tokens, self.block_size)
        return offset > 0 and self.pool.must_copy(seq.block_table[index])

    def _admit(self, budget: _Budget) -> list[Advance]:
        advances = []
        num_slots = self.max_num_seqs - sum(1 + seq.num_pending_forks for seq in self.running)
        while self.waiting and 1 + self.waiting[0].num_pending_forks <= num_slots:
            seq = self.waiting[0]
            hits = self._match(seq)
            # Whole blocks for all its tokens, and one left for each running sequence to grow into:
            # otherwise the next step would preempt what this one admits.
            num_missing = self._num_blocks(seq.num_tokens) - len(hits)
            num_unheld = sum(self.pool.num_references(block) == 0 for block in hits)
            if num_missing + num_unheld + len(self.running) > self.pool.num_available:
                break
            seq.num_computed_tokens = len(hits) * self.block_size
            num_tokens = budget.take(seq)
            if num_tokens == 0:
                seq.num_computed_tokens = 0
                break
            self._take_blocks(seq, hits, num_missing)
            self.running.append(self.waiting.popleft())
            num_slots -= 1 + seq.num_pending_forks
            advances.append(_advance(seq, num_tokens))
        return advances

    def _match(self, seq: Sequence) -> list[int]:
        """The blocks that hold the beginning of ``seq`` already."""
        if self.prefix_cache is None:
            return []
        # Logits of every prompt position are computed once; what was delivered of them may be found.
        max_tokens = seq.num_seen_tokens if seq.request.is_scored else None
        return self.prefix_cache.match(seq.token_ids, seq.namespace, max_tokens)

    def _take_blocks(self, seq: Sequence, hits: list[int], num_new: int) -> None:
        self.pool.share(hits)  # first, or they could be evicted for the new ones
        seq.block_table += hits + self.pool.allocate(num_new)
        if self.prefix_cache is not None and seq.num_seen_tokens == 0 and not seq.request.is_scored:
            self.prefix_cache.record(seq.num_prompt_tokens, len(hits) * self.block_size)

    def _free(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table.clear()
        seq.num_computed_tokens = 0

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _advance(seq: Sequence, num_tokens: int) -> Advance:
    start = seq.num_computed_tokens
    end = start + num_tokens
    num_rows = 1 if end == seq.num_tokens and seq.request.params.max_tokens > 0 else 0
    if seq.request.is_scored:
        num_rows = max(num_rows, min(end, seq.num_prompt_tokens) - max(start, seq.num_seen_tokens))
    return Advance(seq, start, num_tokens, num_rows)
