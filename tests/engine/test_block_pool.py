"""The block pool never hands out a block twice, never loses one, counts references, and keeps what it was told to."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantpipe.engine.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences allocate, grow, fork, write, have blocks kept, and end in any order."""

    @initialize(num_blocks=st.integers(1, 12))
    def open_pool(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.pool.on_evict = self.evict
        self.tables: list[list[int]] = []
        self.kept: set[int] = set()
        self.cached: list[int] = []  # longest unused first
        self.evictions: list[int] = []

    def evict(self, block: int) -> None:
        self.evictions.append(block)

    def drop(self, blocks: list[int]) -> None:
        """What the model expects of a release."""
        held = {block for table in self.tables for block in table}
        self.cached += [block for block in reversed(blocks) if block in self.kept and block not in held]

    def expect_evictions(self, num_new: int, num_free: int) -> None:
        num_evicted = max(0, num_new - num_free)
        assert self.evictions == self.cached[:num_evicted]
        self.kept -= set(self.evictions)
        del self.cached[:num_evicted]
        self.evictions.clear()

    @rule(num=st.integers(0, 13))
    def allocate(self, num: int) -> None:
        num_free, num_available = self.pool.num_free, self.pool.num_available
        if num > num_available:
            with pytest.raises(ValueError, match=f"{num_available} available"):
                self.pool.allocate(num)
            assert self.pool.num_available == num_available
            return
        blocks = self.pool.allocate(num)
        assert len(set(blocks)) == num
        assert not set(blocks) & {block for table in self.tables for block in table}
        self.expect_evictions(num, num_free)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(prefix)
        self.tables.append(list(prefix))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share_cached(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.cached))
        self.pool.share([block])
        self.cached.remove(block)
        self.tables.append([block])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.pool.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.discard(block)
        self.kept.remove(block)
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def make_writable(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([table for table in self.tables if table]))
        index = data.draw(st.integers(0, len(table) - 1))
        source, num_free = table[index], self.pool.num_free
        if not self.pool.must_copy(source):
            assert self.pool.make_writable(table, index) is None
            assert table[index] == source
            return
        if self.pool.num_available == 0:
            with pytest.raises(ValueError, match="0 available"):
                self.pool.make_writable(table, index)
            assert table[index] == source
            return
        assert self.pool.make_writable(table, index) == (source, table[index])
        assert source != table[index]
        assert not self.pool.must_copy(table[index])
        self.expect_evictions(1, num_free)
        self.drop([source])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        self.drop(table)

    @invariant()
    def free_cached_and_held_blocks_are_all_blocks(self) -> None:
        held = [block for table in self.tables for block in table]
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_held == self.pool.num_blocks
        assert self.pool.num_available == self.pool.num_free + self.pool.num_cached
        assert self.pool.num_held == len(set(held))
        assert self.pool.num_cached == len(self.cached)
        for block in range(self.pool.num_blocks):
            assert self.pool.num_references(block) == held.count(block)
            if block in held:
                assert self.pool.must_copy(block) == (held.count(block) > 1 or block in self.kept)


BlockPoolMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase


def test_released_table_is_handed_out_again_in_the_same_order() -> None:
    pool = BlockPool(8)
    table = pool.allocate(5)
    pool.release(table)
    assert pool.allocate(5) == table


def test_tail_of_a_kept_table_is_evicted_before_its_head_and_both_after_free_blocks() -> None:
    pool = BlockPool(5)
    table = pool.allocate(3)
    for block in table:
        pool.keep(block)
    pool.release(table)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    assert pool.allocate(2) == [3, 4]
    assert evicted == []
    assert pool.allocate(2) == evicted == [2, 1]


@pytest.mark.parametrize("misuse", ["release", "share"])
def test_free_block_can_be_neither_released_nor_shared(misuse: str) -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 1"):
        getattr(pool, misuse)([1])


def test_block_that_nobody_holds_cannot_be_kept() -> None:
    with pytest.raises(ValueError, match="block 1 is not held"):
        BlockPool(2).keep(1)


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
