"""The prefix cache with its pool: whatever is shared, copied or evicted, each sequence reads its own past."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.prefix_cache import BlockHash, PrefixCache, PrefixNamespace, chain_hash

NAMESPACE = PrefixNamespace()
History = tuple[str, tuple[int, ...]]


def constant_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    return 7


HASHES: dict[str, BlockHash] = {"chain": chain_hash, "constant": constant_hash}


@dataclass(eq=False)
class Progress:
    """A sequence: ``salt`` is its namespace."""

    salt: str
    token_ids: list[int]
    num_computed: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def namespace(self) -> PrefixNamespace:
        return PrefixNamespace(salt=self.salt)


class PrefixMachine(RuleBasedStateMachine):
    """A slot remembers the whole history of what was written there, so a block shared wrongly shows at once."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 3), block_hash=st.sampled_from(sorted(HASHES)))
    def open_pool(self, num_blocks: int, block_size: int, block_hash: str) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.cache = PrefixCache(self.pool, block_size, HASHES[block_hash])
        self.slots: dict[tuple[int, int], History] = {}
        self.seqs: list[Progress] = []
        self.has_failed = False

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def pick(self, data: st.DataObject) -> Progress:
        return data.draw(st.sampled_from(self.seqs))

    # Two tokens only: prompts meet often.
    @rule(salt=st.sampled_from("ab"), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, salt: str, token_ids: list[int]) -> None:
        seq = Progress(salt, token_ids)
        hits = self.cache.match(token_ids, seq.namespace)
        assert len(hits) * self.block_size < len(token_ids)
        num_unheld = sum(self.pool.num_references(block) == 0 for block in hits)
        num_missing = self.blocks_for(len(token_ids)) - len(hits)
        if num_unheld + num_missing > self.pool.num_available:
            return
        self.pool.share(hits)
        seq.table = hits + self.pool.allocate(num_missing)
        seq.num_computed = len(hits) * self.block_size
        self.seqs.append(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), num=st.integers(1, 5))
    def compute(self, data: st.DataObject, num: int) -> None:
        seq = self.pick(data)
        end = min(len(seq.token_ids), seq.num_computed + num)
        for position in range(seq.num_computed, end):
            index = position // self.block_size
            if self.pool.must_copy(seq.table[index]):
                if self.pool.num_available == 0:
                    break
                copied = self.pool.make_writable(seq.table, index)
                assert copied is not None
                for offset in range(self.block_size):
                    self.slots[copied[1], offset] = self.slots.get((copied[0], offset), ("", ()))
            history = (seq.salt, tuple(seq.token_ids[: position + 1]))
            self.slots[seq.table[index], position % self.block_size] = history
            seq.num_computed = position + 1
        self.cache.register(seq.table, seq.token_ids, seq.num_computed, seq.namespace)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def decode(self, data: st.DataObject, token_id: int) -> None:
        seq = self.pick(data)
        if seq.num_computed < len(seq.token_ids):
            return
        num_missing = self.blocks_for(len(seq.token_ids) + 1) - len(seq.table)
        if num_missing > self.pool.num_available:
            return
        seq.token_ids.append(token_id)
        seq.table += self.pool.allocate(num_missing)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.pool.share(seq.table)
        self.seqs.append(Progress(seq.salt, list(seq.token_ids), seq.num_computed, list(seq.table)))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        seq = self.pick(data)
        self.seqs.remove(seq)
        if fails:
            self.cache.forget(seq.table)
            self.has_failed = True
        self.pool.release(seq.table)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.seqs.remove(seq)
        self.pool.release(seq.table)
        self.admit(seq.salt, seq.token_ids)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        held = {block for seq in self.seqs for block in seq.table}
        assert self.pool.num_held == len(held)
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == self.pool.num_blocks
        assert self.pool.num_cached <= len(self.cache) <= self.pool.num_cached + self.pool.num_held

    @invariant()
    def every_sequence_reads_its_own_past(self) -> None:
        for seq in self.seqs:
            for position in range(seq.num_computed):
                slot = seq.table[position // self.block_size], position % self.block_size
                assert self.slots[slot] == (seq.salt, tuple(seq.token_ids[: position + 1]))

    @invariant()
    def what_was_computed_and_is_held_is_found(self) -> None:
        for seq in self.seqs:
            hits = self.cache.match(seq.token_ids[: seq.num_computed], seq.namespace)
            if not self.has_failed:
                assert hits == seq.table[: max(0, seq.num_computed - 1) // self.block_size]

    def teardown(self) -> None:
        for seq in getattr(self, "seqs", []):
            self.pool.release(seq.table)
        if hasattr(self, "pool"):
            assert self.pool.num_held == 0
            assert self.pool.num_free + self.pool.num_cached == self.pool.num_blocks


PrefixMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestPrefixCache = PrefixMachine.TestCase


def make_cache(num_blocks: int = 8, block_hash: BlockHash = chain_hash) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, 2, block_hash)


def put(pool: BlockPool, cache: PrefixCache, token_ids: list[int], namespace: PrefixNamespace = NAMESPACE) -> list[int]:
    """The blocks of a sequence that read ``token_ids`` and still runs."""
    table = pool.allocate(-(-len(token_ids) // 2))
    cache.register(table, token_ids, len(token_ids), namespace)
    return table


@pytest.mark.parametrize("name", HASHES)
def test_match_is_the_longest_prefix_of_whole_blocks_that_leaves_a_token(name: str) -> None:
    pool, cache = make_cache(block_hash=HASHES[name])
    table = put(pool, cache, [1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 4, 5, 6], NAMESPACE) == table[:2]
    assert cache.match([1, 2, 3, 4], NAMESPACE) == table[:1]
    assert cache.match([1, 2], NAMESPACE) == []
    assert cache.match([1, 2, 9, 4, 5], NAMESPACE) == table[:1]
    assert cache.match([3, 4, 5], NAMESPACE) == []
    assert cache.match([1, 2, 3, 4, 5, 6], NAMESPACE, max_tokens=3) == table[:1]
    assert cache.match([], NAMESPACE) == []


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize(
    "other",
    [
        PrefixNamespace(salt="other tenant"),
        PrefixNamespace(kv_dtype="int8_per_token_head"),
        PrefixNamespace(artifact_digest="another"),
        PrefixNamespace(attention="window"),
    ],
)
def test_another_namespace_hits_nothing(name: str, other: PrefixNamespace) -> None:
    pool, cache = make_cache(block_hash=HASHES[name])
    table = put(pool, cache, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4, 5], other) == []
    own = put(pool, cache, [1, 2, 3, 4], other)
    assert cache.match([1, 2, 3, 4, 5], other) == own
    assert not set(own) & set(table)


def test_equal_block_computed_twice_is_kept_once_and_the_other_is_free_again() -> None:
    pool, cache = make_cache()
    first = put(pool, cache, [1, 2, 3, 4])
    second = put(pool, cache, [1, 2, 3, 9])
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert (pool.num_held, pool.num_references(first[0])) == (3, 2)


def test_successor_of_an_evicted_block_is_never_met_again() -> None:
    pool, cache = make_cache(num_blocks=3)
    table = put(pool, cache, [1, 2, 3, 4])
    cache.forget(table[:1])
    assert cache.match([1, 2, 3, 4, 5], NAMESPACE) == []
    again = put(pool, cache, [1, 2])
    assert cache.match([1, 2, 3, 4, 5], NAMESPACE) == again


def test_longest_unused_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    pool, cache = make_cache(num_blocks=4)
    old, new = put(pool, cache, [1, 2, 3, 4]), put(pool, cache, [5, 6, 7, 8])
    pool.release(new)
    pool.release(old)
    pool.share(cache.match([5, 6, 0], NAMESPACE))
    pool.release(new[:1])  # used again: now the most recent of all
    assert pool.allocate(1) == [new[1]]
    assert pool.allocate(1) == [old[1]]
    assert cache.match([1, 2, 3, 4, 0], NAMESPACE) == [old[0]]
    assert cache.match([5, 6, 7, 8, 0], NAMESPACE) == [new[0]]
    assert (cache.num_evictions, len(cache)) == (2, 2)


def test_forgotten_block_is_free_once_nobody_holds_it() -> None:
    pool, cache = make_cache()
    table = put(pool, cache, [1, 2, 3, 4])
    cache.forget(table)
    pool.release(table)
    cached = put(pool, cache, [5, 6])
    pool.release(cached)
    cache.forget(cached)
    assert (pool.num_free, pool.num_cached, cache.num_evictions, len(cache)) == (8, 0, 0, 0)


def test_registering_a_longer_context_hashes_the_new_block_only() -> None:
    calls: list[tuple[int, ...]] = []

    def counting_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
        calls.append(token_ids)
        return chain_hash(parent_hash, token_ids)

    pool, cache = make_cache(600, counting_hash)
    table = put(pool, cache, list(range(1000)))
    calls.clear()
    table += pool.allocate(1)
    cache.register(table, list(range(1002)), 1002, NAMESPACE)
    cache.register(table, list(range(1003)), 1003, NAMESPACE)
    assert set(calls) == {(1000, 1001)}
