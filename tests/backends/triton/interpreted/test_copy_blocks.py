"""Blocks are copied in every layer, all sources read as they were before."""

import pytest
import torch

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.kv_cache import TritonKVCache
from quantpipe.backends.triton.ops.copy_blocks import copy_blocks
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_scales import KVScales

# Apart; one source for two; a chain; a swap.
COPIES = [[(3, 0)], [(3, 0), (3, 5)], [(1, 2), (2, 4)], [(1, 2), (2, 1), (0, 5)]]


@pytest.mark.parametrize("copies", COPIES, ids=str)
def test_destinations_hold_what_sources_held(copies: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_table, "COPY_WORDS", 16)  # so that a block takes several programs
    pool = torch.randn(3, 6, 2, 4, 7, generator=torch.Generator().manual_seed(0))
    expected = pool.clone()
    for source, destination in copies:
        expected[:, destination] = pool[:, source]
    copy_blocks(pool, copies)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_cache_copies_everything_that_a_block_consists_of(kv_dtype: str) -> None:
    # Nine tokens of three heads and five or ten bytes: a block is no whole number of wide words.
    scales = KVScales((torch.ones(3),) * 2, (torch.ones(3),) * 2)
    kv = TritonKVCache.allocate(4, 9, kv_dtype, (2, 3, 10), torch.float16, torch.device("cpu"), scales)
    stored = [tensor for store in (kv.keys, kv.values) for tensor in store.tensors]
    for tensor in stored:
        tensor.copy_(torch.randint(0, 100, tensor.shape, generator=torch.Generator().manual_seed(1)))
    before = [tensor.clone() for tensor in stored]
    kv.copy_blocks([])
    kv.copy_blocks([(3, 1)])
    for tensor, old in zip(stored, before, strict=True):
        assert torch.equal(tensor[:, 1], old[:, 3])
        assert torch.equal(tensor[:, [0, 2, 3]], old[:, [0, 2, 3]])
