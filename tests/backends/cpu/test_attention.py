"""Which sequences of a step attend together, and what each of their tokens may see."""

from collections.abc import Callable

import torch

from quantpipe.backends.cpu.attention import plan_groups
from quantpipe.backends.cpu.kv_cache import CpuKVCache
from quantpipe.backends.protocol import BatchInput

BLOCK_SIZE = 4
MakeBatch = Callable[..., BatchInput]


def cache() -> CpuKVCache:
    return CpuKVCache.allocate(64, BLOCK_SIZE, "auto", 1, 1, 8)


def part(num_new: int, num_cached: int) -> tuple[list[int], int, range]:
    return [1] * num_new, num_cached, range(-(-(num_new + num_cached) // BLOCK_SIZE))


def test_alike_decodes_share_one_group_without_copying_rows(make_batch: MakeBatch) -> None:
    (group,) = plan_groups(make_batch([part(1, 30), part(1, 40), part(1, 35)], BLOCK_SIZE), cache())
    assert group.rows_Sn is None
    assert (group.num_sequences, group.query_len, group.context_len) == (3, 1, 41)
    assert group.mask_S1nC is not None
    assert (group.mask_S1nC == 0).sum(-1).flatten().tolist() == [31, 41, 36]


def test_one_long_context_does_not_make_short_ones_read_padding(make_batch: MakeBatch) -> None:
    groups = plan_groups(make_batch([part(1, 30), part(1, 200), part(1, 31)], BLOCK_SIZE), cache())
    assert [group.context_len for group in groups] == [32, 201]
    assert [group.rows_Sn.tolist() for group in groups if group.rows_Sn is not None] == [[0, 2], [1]]


def test_fresh_prefill_needs_no_mask_and_a_continued_one_sees_its_past(make_batch: MakeBatch) -> None:
    (fresh,) = plan_groups(make_batch([part(6, 0)], BLOCK_SIZE), cache())
    assert fresh.is_causal and fresh.mask_S1nC is None
    (continued,) = plan_groups(make_batch([part(3, 5)], BLOCK_SIZE), cache())
    assert not continued.is_causal and continued.mask_S1nC is not None
    hidden = continued.mask_S1nC[0, 0].isinf().int()
    assert torch.equal(hidden, torch.ones(3, 8, dtype=torch.int32).triu(6))


def test_after_an_overflow_no_sequence_reads_beyond_its_own_tokens(make_batch: MakeBatch) -> None:
    kv = cache()
    kv.has_nonfinite = True
    groups = plan_groups(make_batch([part(1, 30), part(1, 40)], BLOCK_SIZE), kv)
    assert [(group.num_sequences, group.context_len) for group in groups] == [(1, 31), (1, 41)]


def test_short_sequences_are_padded_with_their_own_last_block(make_batch: MakeBatch) -> None:
    parts = [([1], 9, [7, 5, 6]), ([1], 4, [3, 2])]
    (group,) = plan_groups(make_batch(parts, BLOCK_SIZE), cache())
    assert group.block_ids.tolist() == [7, 5, 6, 3, 2, 2]
