"""The int8 rule: each token and head by its own absmax / 127, quantized when written, in both backends alike."""

import torch

from quantpipe.backends.cpu.kv_cache import CpuKVCache
from quantpipe.backends.reference import ReferenceKVCache, read_context, write_tokens

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM = 6, 4, 3, 8
SLOTS = torch.tensor([9, 2, 23, 0, 14])


def random_tokens() -> torch.Tensor:
    """Keys and values [T, 2J, D] whose heads differ in size by orders of magnitude; one head is all zero."""
    generator = torch.Generator().manual_seed(0)
    new_TJD = torch.randn(len(SLOTS), 2 * NUM_HEADS, HEAD_DIM, generator=generator)
    new_TJD *= 10 ** torch.randint(-3, 4, (len(SLOTS), 2 * NUM_HEADS, 1), generator=generator).float()
    new_TJD[1, 2] = 0
    return new_TJD


def read_back(new_TJD: torch.Tensor, dtype: str) -> torch.Tensor:
    kv = CpuKVCache.allocate(NUM_BLOCKS, BLOCK_SIZE, dtype, 1, NUM_HEADS, HEAD_DIM)
    kv.write(0, new_TJD, SLOTS)
    return kv.read(0, torch.arange(NUM_BLOCKS), 1)[:, 0, SLOTS].transpose(0, 1)


def test_float_cache_returns_what_was_written() -> None:
    new_TJD = random_tokens()
    assert torch.equal(read_back(new_TJD, "auto"), new_TJD)


def test_int8_error_is_within_half_a_step_of_each_token_and_head() -> None:
    new_TJD = random_tokens()
    found_TJD = read_back(new_TJD, "int8_per_token_head")
    half_step_TJ1 = new_TJD.abs().amax(-1, keepdim=True) / 127 / 2
    assert bool(((found_TJD - new_TJD).abs() <= half_step_TJ1 * (1 + 1e-5)).all())
    assert not torch.equal(found_TJD, new_TJD)
    largest = new_TJD.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(found_TJD.gather(-1, largest), new_TJD.gather(-1, largest))


def test_both_backends_store_the_same_numbers() -> None:
    new_TJD = random_tokens()
    keys, values = (torch.zeros(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_DIM, dtype=torch.int8) for _ in range(2))
    key_scales, value_scales = (torch.zeros(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, 1) for _ in range(2))
    reference = ReferenceKVCache(
        NUM_BLOCKS, BLOCK_SIZE, "int8_per_token_head", (keys,), (values,), (key_scales,), (value_scales,)
    )
    write_tokens(0, new_TJD[:, :NUM_HEADS], new_TJD[:, NUM_HEADS:], SLOTS, reference)
    key_CJD, value_CJD = read_context(0, torch.arange(NUM_BLOCKS), NUM_BLOCKS * BLOCK_SIZE, reference)
    expected_TJD = torch.cat((key_CJD, value_CJD), dim=1)[SLOTS]
    assert torch.equal(read_back(new_TJD, "int8_per_token_head"), expected_TJD)


def test_sequences_are_read_side_by_side() -> None:
    kv = CpuKVCache.allocate(NUM_BLOCKS, BLOCK_SIZE, "auto", 1, NUM_HEADS, HEAD_DIM)
    numbered = torch.arange(NUM_BLOCKS * BLOCK_SIZE).float().view(-1, 1, 1).expand(-1, 2 * NUM_HEADS, HEAD_DIM)
    kv.write(0, numbered, torch.arange(NUM_BLOCKS * BLOCK_SIZE))
    read_JSCD = kv.read(0, torch.tensor([5, 0, 3, 1]), 2)
    assert read_JSCD.shape == (2 * NUM_HEADS, 2, 2 * BLOCK_SIZE, HEAD_DIM)
    assert read_JSCD[0, :, :, 0].tolist() == [[20, 21, 22, 23, 0, 1, 2, 3], [12, 13, 14, 15, 4, 5, 6, 7]]
