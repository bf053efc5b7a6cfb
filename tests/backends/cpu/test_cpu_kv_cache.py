"""The CPU's paged cache gives back what the rules of ``formats.kv_mode`` make of each token, as the reference does."""

import pytest
import torch

from quantpipe.backends.cpu.kv_cache import CpuKVCache
from quantpipe.backends.reference_kv_cache import ReferenceKVCache
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_rounding import round_kv
from quantpipe.formats.kv_scales import KVScales

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 6, 4, 3, 8
SLOTS = torch.tensor([9, 2, 23, 0, 14])
SCALES = KVScales((torch.tensor([0.1, 1.0, 10.0]),), (torch.tensor([0.02, 0.3, 4.0]),))


def random_tokens() -> torch.Tensor:
    """Keys and values [T, 2J, D] whose heads differ in size by orders of magnitude; one head is all zero."""
    generator = torch.Generator().manual_seed(0)
    new_TJD = torch.randn(len(SLOTS), 2 * NUM_HEADS, HEAD_DIM, generator=generator)
    new_TJD *= 10 ** torch.randint(-3, 4, (len(SLOTS), 2 * NUM_HEADS, 1), generator=generator).float()
    new_TJD[1, 2] = 0
    return new_TJD


def cache(dtype: str) -> CpuKVCache:
    return CpuKVCache.allocate(NUM_BLOCKS, BLOCK_SIZE, dtype, 1, NUM_HEADS, HEAD_DIM, SCALES)


def read_back(new_TJD: torch.Tensor, dtype: str) -> torch.Tensor:
    kv = cache(dtype)
    kv.write(0, new_TJD, SLOTS)
    return torch.cat(kv.read(0, torch.arange(NUM_BLOCKS), 1))[:, 0, SLOTS].transpose(0, 1)


def test_float_cache_returns_what_was_written() -> None:
    new_TJD = random_tokens()
    assert torch.equal(read_back(new_TJD, "auto"), new_TJD)


@pytest.mark.parametrize("dtype", KV_MODES)
def test_each_token_and_head_is_rounded_by_its_rule(dtype: str) -> None:
    new_TJD, mode = random_tokens(), KV_MODES[dtype]
    key_TJD, value_TJD = new_TJD.chunk(2, dim=1)
    expected_TJD = torch.cat(
        (
            round_kv(key_TJD, mode.key, SCALES.key[0].unsqueeze(-1)),
            round_kv(value_TJD, mode.value, SCALES.value[0].unsqueeze(-1)),
        ),
        dim=1,
    )
    assert torch.equal(read_back(new_TJD, dtype), expected_TJD)


@pytest.mark.parametrize("dtype", KV_MODES)
def test_both_backends_give_back_the_same_numbers(dtype: str) -> None:
    new_TJD = random_tokens()
    sizes = (1, NUM_HEADS, HEAD_DIM)
    reference = ReferenceKVCache.allocate(NUM_BLOCKS, BLOCK_SIZE, dtype, *sizes, SCALES)
    found = []
    for store, part_TJD in zip((reference.keys[0], reference.values[0]), new_TJD.chunk(2, dim=1), strict=True):
        store.write(part_TJD, SLOTS)
        found.append(store.read(torch.arange(NUM_BLOCKS), NUM_BLOCKS * BLOCK_SIZE)[SLOTS])
    assert torch.equal(read_back(new_TJD, dtype), torch.cat(found, dim=1))


@pytest.mark.parametrize("dtype", KV_MODES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_token_that_overflowed_reads_as_not_finite_and_its_neighbours_as_they_were(dtype: str, bad: float) -> None:
    new_TJD = random_tokens()
    new_TJD[3, :, 5] = bad
    found_TJD = read_back(new_TJD, dtype)
    assert not found_TJD[3, :, 5].isfinite().any()
    others = [0, 1, 2, 4]
    assert torch.equal(found_TJD[others], read_back(random_tokens(), dtype)[others])


@pytest.mark.parametrize("dtype", KV_MODES)
def test_sequences_are_read_side_by_side(dtype: str) -> None:
    kv = cache(dtype)
    numbered_T = torch.arange(NUM_BLOCKS * BLOCK_SIZE).float()
    kv.write(0, numbered_T.view(-1, 1, 1).expand(-1, 2 * NUM_HEADS, HEAD_DIM), numbered_T.long())
    for part_JSCD, rule, scales in zip(
        kv.read(0, torch.tensor([5, 0, 3, 1]), 2),
        (KV_MODES[dtype].key, KV_MODES[dtype].value),
        (SCALES.key, SCALES.value),
        strict=True,
    ):
        assert part_JSCD.shape == (NUM_HEADS, 2, 2 * BLOCK_SIZE, HEAD_DIM)
        expected_TJD = round_kv(
            numbered_T.view(-1, 1, 1).expand(-1, NUM_HEADS, HEAD_DIM), rule, scales[0].unsqueeze(-1)
        )
        order = torch.tensor([[20, 21, 22, 23, 0, 1, 2, 3], [12, 13, 14, 15, 4, 5, 6, 7]])
        assert torch.equal(part_JSCD, expected_TJD[order].permute(2, 0, 1, 3))


@pytest.mark.parametrize("dtype", KV_MODES)
@pytest.mark.parametrize("backend", [CpuKVCache, ReferenceKVCache])
def test_copied_blocks_hold_what_their_sources_held_before(
    backend: type[CpuKVCache] | type[ReferenceKVCache], dtype: str
) -> None:
    kv = backend.allocate(
        NUM_BLOCKS, BLOCK_SIZE, dtype, 2, NUM_HEADS, HEAD_DIM, KVScales(SCALES.key * 2, SCALES.value * 2)
    )
    stores = [*kv.keys, *kv.values] if isinstance(kv, ReferenceKVCache) else [s for own in kv.layers for s in own]
    generator = torch.Generator().manual_seed(0)
    for store in stores:
        for stored in (store.codes, store.parameters):
            if stored is not None:
                stored.copy_(torch.randint(-99, 99, stored.shape, generator=generator))
    before = [_blocks_first(stored, backend).clone() for store in stores for stored in (store.codes, store.parameters)]
    kv.copy_blocks([(0, 4), (4, 1), (2, 5)])
    after = [_blocks_first(stored, backend) for store in stores for stored in (store.codes, store.parameters)]
    for old_B, new_B in zip(before, after, strict=True):
        assert torch.equal(new_B, old_B[[0, 4, 2, 3, 0, 2]] if len(old_B) else old_B)


def _blocks_first(stored: torch.Tensor | None, backend: type) -> torch.Tensor:
    if stored is None:
        return torch.empty(0)
    return stored if backend is ReferenceKVCache else stored.transpose(0, 1)
