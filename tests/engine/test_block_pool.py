"""The block pool never hands out a block twice, never loses one, and counts references."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantpipe.engine.block_pool import BlockPool


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences allocate, grow, fork and end in any order."""

    @initialize(num_blocks=st.integers(1, 12))
    def open_pool(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []

    @rule(num=st.integers(0, 13))
    def allocate(self, num: int) -> None:
        num_free = self.pool.num_free
        if num > num_free:
            with pytest.raises(ValueError):
                self.pool.allocate(num)
            assert self.pool.num_free == num_free
            return
        blocks = self.pool.allocate(num)
        assert len(set(blocks)) == num
        assert not set(blocks) & {block for table in self.tables for block in table}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        prefix = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(prefix)
        self.tables.append(list(prefix))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def free_and_held_blocks_are_all_blocks(self) -> None:
        held = [block for table in self.tables for block in table]
        assert self.pool.num_free + self.pool.num_held == self.pool.num_blocks
        assert self.pool.num_held == len(set(held))
        for block in range(self.pool.num_blocks):
            assert self.pool.num_references(block) == held.count(block)


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase


def test_released_table_is_handed_out_again_in_the_same_order() -> None:
    pool = BlockPool(8)
    table = pool.allocate(5)
    pool.release(table)
    assert pool.allocate(5) == table


@pytest.mark.parametrize("misuse", ["release", "share"])
def test_free_block_can_be_neither_released_nor_shared(misuse: str) -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="block 1"):
        getattr(pool, misuse)([1])


def test_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
