"""Which sequences advance in the next step, and by how many tokens. Knows blocks, not tensors; reads no clock.

There are no phases: a step has one budget of tokens, and a sequence gets as many as it still has to read: one where
it decodes, a chunk where it reads a prompt or comes back from preemption. A policy puts all sequences in order.

1. Running sequences first: those that decode get their one token each, the others share what is left, in order and at
   most a chunk each. A long prompt therefore delays a decode by one step of at most the budget.
2. Blocks are given in order. Where none is left, the last running sequence gives all of its back and will recompute
   them later. The first is never the victim while others run, and the order among those that make no progress does not
   change, so the first always ends. A block that others read too is copied before it is written.
3. Waiting sequences are admitted in order, each with blocks for all of its tokens, while the batching mode, the batch
   limit and the room for what they will yet take allow. One that does not fit is not overtaken. Long prompts alone
   stand in a lane of their own, where only so many are read at a time. What the prefix cache knows of a sequence, it
   need not read: a preempted one mostly finds its own blocks again.
4. With a drafter, what tokens and blocks are still left go to guesses for those that decode, unless blocks were so
   short that somebody was preempted.
5. Where every layer has a window, blocks behind it go back to the pool after each step, and a sequence has those for
   the tokens of its next step only: a prompt of any length is read in constant memory.
"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from quantpipe.engine.admission import ADMISSIONS, Candidate, OutputLengths, Room, most_computed_tokens
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.batch_limit import BatchLimit
from quantpipe.engine.batching import Batching
from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.block_tables import BlockTables
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.policies import POLICIES, STATIC_POLICIES
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import Sequence
from quantpipe.engine.speculative.drafter import Drafter
from quantpipe.engine.speculative.drafting import Drafting
from quantpipe.engine.step import Advance as Advance
from quantpipe.engine.step import Budget, advance_of
from quantpipe.engine.step import Step as Step
from quantpipe.engine.waiting import WaitingQueue, place_of
from quantpipe.errors import RequestError

# How much the latest step counts in the average pace.
PACE_FRAC = 0.1
# Who did not fit is tried again when somebody leaves, or after so many steps: outputs may prove shorter than expected,
# or the prefix cache may have come to know more.
RETRY_STEPS = 16


@dataclass
class _Plan:
    """A step in the making. ``order`` are those running; it loses its tail where they are preempted."""

    now_s: float
    order: list[Sequence]
    budget: Budget
    advances: list[Advance] = field(default_factory=list)
    copies: dict[Sequence, tuple[int, int]] = field(default_factory=dict)
    has_preempted: bool = False


class Scheduler:
    """The queue of waiting sequences, the running ones, and the blocks they hold. Without ``prefix_cache`` none share.
    Without ``drafter`` nothing is guessed.

    ``max_scored_rows`` bounds the prompt positions per step whose logits are wanted, as each is a vocabulary wide.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        max_scored_rows: int,
        prefix_cache: PrefixCache | None = None,
        drafter: Drafter | None = None,
        window: AttentionWindow | None = None,
    ) -> None:
        self.pool = pool
        self.config = config
        self.max_scored_rows = max_scored_rows
        self.running: dict[Sequence, None] = {}
        self.num_preemptions = 0
        self.batch_limit = BatchLimit(config.max_num_batched_tokens, config.target_step_s)
        self.output_lengths = OutputLengths()
        self._policy = POLICIES[config.policy]
        self.waiting = WaitingQueue(
            self._policy, config.long_prompt_tokens if config.max_long_prefills is not None else None
        )
        self._batching = Batching(config.batching, config.max_num_seqs, config.static_wait_s)
        self._token_s = 0.04  # until the first step
        self._numbers = itertools.count()
        self._started_s = 0.0
        self._refused: Sequence | None = None
        self._num_refusals = 0
        self._order: list[Sequence] | None = None  # of those that run, until somebody comes or goes
        self._window = window or AttentionWindow(config.block_size)
        self._tables = BlockTables(pool, self._window, prefix_cache)
        self._drafting = None if drafter is None else Drafting(drafter, config.num_draft_tokens, self._tables)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. RequestError where the whole pool could not hold it."""
        num_tokens = most_computed_tokens(seq)
        num_blocks = self._window.most_blocks(num_tokens)
        if num_blocks > self.pool.num_blocks:
            raise RequestError(
                f"prompt: {num_tokens:,} tokens with max_tokens need {num_blocks:,} KV blocks and "
                f"there are {self.pool.num_blocks:,}; shorten it or raise engine.num_kv_blocks",
                "prompt",
            )
        seq.number = next(self._numbers)
        seq.expected_new_tokens = self.output_lengths.expected(seq.request.params.max_tokens)
        seq.token_s = self._token_s
        self._batching.arrived(seq.request.arrival_s)
        self.waiting.push(seq, seq.request.arrival_s)

    def remove(self, seq: Sequence, is_complete: bool = False) -> None:
        """Forget a sequence in whatever state it is, and free what it holds. From complete ones lengths are learned."""
        if seq in self.running:
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        if self._drafting is not None:
            self._drafting.forget(seq)
        if is_complete:
            self.output_lengths.record(seq.num_generated_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` run beside ``parent``, whose computed tokens it begins with: it shares the blocks of those.

        Call after ``commit``. The slot for it was kept free since ``parent`` was admitted, as one of its pending forks,
        which it ceases to be.
        """
        child.number, child.token_s = parent.number, parent.token_s
        child.expected_new_tokens = parent.expected_new_tokens
        self._tables.fork(parent, child)
        self._join(child)

    def schedule(self, now_s: float) -> Step:
        """Choose the next step and allocate its blocks. Nothing advances until ``commit``."""
        self._started_s = now_s
        if self._drafting is not None:
            self._drafting.take_back()
        plan = self._plan(now_s)
        self._advance_running(plan)
        if self.waiting and not plan.has_preempted:
            self._admit(plan)
        if self._drafting is not None and not plan.has_preempted:
            self._drafting.extend(plan.advances, self._draft_room(plan))
        wait_s = 0.0 if plan.advances else self._batching.wait_s(len(self.waiting), now_s)
        return Step(tuple(plan.advances), tuple(plan.copies.values()), wait_s)

    def commit(self, step: Step, failed: Collection[Sequence] = (), now_s: float | None = None) -> None:
        """The step was computed: its keys and values are in the cache, to be shared but for those of ``failed``.

        Of guesses, those count that are tokens of their sequence by now. What wrong ones left in the cache lies behind
        its tokens, where whatever is read next takes its place; nothing looks at it before.

        ``now_s`` is when it ended; without it nothing is learned about how long steps take.
        """
        num_tokens, block_size, is_bounded = 0, self.config.block_size, self._window.is_bounded
        for seq, start, num_read, _, draft_ids in step.advances:
            end = start + num_read
            num_tokens += num_read
            if draft_ids and self._drafting is not None:
                end = seq.num_tokens - 1
                self._drafting.observe(seq, len(draft_ids), max(0, end - start - 1))
            seq.num_computed_tokens = end
            if end > seq.num_seen_tokens:
                seq.num_seen_tokens = end
            if end % block_size < end - start or seq in failed:  # it filled a block, or never will
                self._tables.register(seq, end, seq in failed)
            if is_bounded:
                self._tables.let_go(seq)
        if now_s is not None:
            step_s = now_s - self._started_s
            self._token_s += PACE_FRAC * (step_s - self._token_s)
            self.batch_limit.observe(num_tokens, step_s, now_s)

    def _plan(self, now_s: float) -> _Plan:
        if self._order is None or self.config.policy not in STATIC_POLICIES:
            self._order = [place[-1] for place in sorted([place_of(seq, self._policy, now_s) for seq in self.running])]
        most = self.config.max_num_batched_tokens
        return _Plan(now_s, self._order, Budget(most, self.max_scored_rows, self.config.max_prefill_chunk or most))

    def _advance_running(self, plan: _Plan) -> None:
        """Tokens and blocks for those that run, in order. Most decode, so what each of those costs is kept small."""
        order, advances, is_ready = plan.order, plan.advances, self._tables.is_ready
        shares = self._share(plan)
        index = 0
        while index < len(order):
            seq = order[index]
            index += 1
            num_tokens = shares.get(seq, 1)
            if num_tokens == 0 or not (is_ready(seq) or self._grow(seq, plan)):
                continue
            advances.append(
                advance_of(seq, num_tokens) if seq in shares else Advance(seq, len(seq.token_ids) - 1, 1, 1)
            )

    def _share(self, plan: _Plan) -> dict[Sequence, int]:
        """Tokens for those that read what was not generated in the last step; the others get their one anyway.

        The budget covers a token for everybody, whatever the batch limit says.
        """
        reading = [
            seq
            for seq in plan.order
            if seq.num_computed_tokens < len(seq.token_ids) - 1 or len(seq.token_ids) == len(seq.request.prompt_ids)
        ]
        budget = plan.budget
        budget.num_tokens -= len(plan.order) - len(reading)
        shares = {seq: budget.take(seq) for seq in reading if seq.num_uncomputed_tokens == 1}
        # The limit is on prompts: decodes alone may exceed it, and one block at least goes on being read.
        num_decoding = len(plan.order) - len(reading) + len(shares)
        budget.num_tokens = min(
            budget.num_tokens, max(self.batch_limit.num_tokens - num_decoding, self.config.block_size)
        )
        return shares | {seq: budget.take(seq) for seq in reading if seq not in shares}

    def _grow(self, seq: Sequence, plan: _Plan) -> bool:
        """Give ``seq`` what blocks it needs, preempting from the end; False where it was itself preempted."""
        while self._tables.num_missing(seq) > self.pool.num_available:
            victim = plan.order.pop()
            self._preempt(victim, plan)
            if victim is seq:
                return False
        copy = self._tables.extend(seq)
        if copy is not None:
            plan.copies[seq] = copy
        return True

    def _preempt(self, seq: Sequence, plan: _Plan) -> None:
        self._leave(seq)
        plan.copies.pop(seq, None)  # its destination may be given to another in this very step
        plan.has_preempted = True
        self.waiting.push(seq, plan.now_s)
        self.num_preemptions += 1

    def _admit(self, plan: _Plan) -> None:
        num_places = self._batching.num_places(len(self.running), len(self.waiting), plan.now_s)
        if num_places == 0 or plan.budget.num_tokens == 0:
            return
        num_slots = self._num_slots()
        num_long = self._num_long_prefills(plan)
        room = None
        while num_places > 0:
            seq = self.waiting.head(plan.now_s, takes_long=num_long > 0)
            if seq is None:
                return
            num_slots -= 1 + seq.num_pending_forks
            if num_slots < 0:
                self._batching.close()
                return
            if self._was_just_refused(seq):
                return
            room = room or ADMISSIONS[self.config.admission](self.running, self._window, self.output_lengths)
            if not self._start(seq, room, plan):
                return
            num_places -= 1
            num_long -= self.waiting.is_long(seq)

    def _draft_room(self, plan: _Plan) -> int:
        """How many guesses a step has tokens and rows of logits for, when everybody has got what they need."""
        num_tokens = sum([advance.num_tokens for advance in plan.advances])
        return min(self.batch_limit.num_tokens - num_tokens, plan.budget.num_scored_rows)

    def _was_just_refused(self, seq: Sequence) -> bool:
        if seq is not self._refused or self._num_refusals == RETRY_STEPS:
            return False
        self._num_refusals += 1
        return True

    def _num_slots(self) -> int:
        """How many more sequences may run. If none does, the batch limit cannot be too low for one."""
        most = self.config.max_num_seqs
        if not self.running:
            return most
        num_used = len(self.running) + sum(seq.num_pending_forks for seq in self.running)
        return min(most, self.batch_limit.num_tokens) - num_used

    def _num_long_prefills(self, plan: _Plan) -> int:
        """How many more long prompts may be read."""
        most = self.config.max_long_prefills
        if most is None:
            return len(self.waiting)
        return most - sum(
            self.waiting.is_long(seq) and seq.num_computed_tokens < seq.num_prompt_tokens for seq in plan.order
        )

    def _start(self, seq: Sequence, room: Room, plan: _Plan) -> bool:
        """Admit a sequence, if there is room for it now and later and something left to read it with."""
        found = self._tables.place(seq)
        num_found, num_unheld = len(found.held), sum(self.pool.num_references(block) == 0 for block in found.held)
        candidate = Candidate(seq, max(0, self._tables.num_missing(seq) - num_found), num_unheld, num_found)
        if not self._fits(candidate, room):
            self._tables.withdraw(seq)
            self._refused, self._num_refusals = seq, 1
            self._batching.close()
            return False
        num_tokens = plan.budget.take(seq)
        if num_tokens == 0:
            self._tables.withdraw(seq)
            return False
        self.waiting.remove(seq)
        self._tables.begin(seq, found)
        if seq.queued_s is None:
            seq.queued_s = max(0.0, plan.now_s - seq.request.arrival_s)
        room.add(candidate)
        self._batching.joined()
        self._join(seq)
        plan.advances.append(advance_of(seq, num_tokens))
        return True

    def _fits(self, candidate: Candidate, room: Room) -> bool:
        num_available = self.pool.num_available
        if candidate.num_missing + candidate.num_unheld > num_available:
            return False
        # What anybody will take later is no concern while nobody runs.
        return not self.running or room.admits(candidate, num_available)

    def _join(self, seq: Sequence) -> None:
        self.running[seq] = None
        self._order = None

    def _leave(self, seq: Sequence) -> None:
        del self.running[seq]
        self._tables.free(seq)
        self._order = None
        self._refused = None
