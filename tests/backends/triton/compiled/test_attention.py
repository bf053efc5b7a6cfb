"""Attention, and what writes the cache it reads, compiled for each architecture with every entry of the launch table."""

import pytest
import torch
from ahead_of_time import Compiled, compile_all

from quantpipe.backends.triton.kv_cache import TritonKVCache
from quantpipe.backends.triton.ops.attention_chunk import Chunks, attend_chunks
from quantpipe.backends.triton.ops.attention_decode import Decodes, attend_decodes
from quantpipe.backends.triton.ops.attention_tile import Sight
from quantpipe.backends.triton.ops.rope_kv import HeadNorm, Turns, rope_and_write
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_scales import KVScales

META = torch.device("meta")
NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 16, 4, 16
# Of each mode, how wide the reads of a head's codes can be: half a head is 64 dimensions of one byte, or a half.
HEAD_DIM = 128
SINKS = Sight(window=1024, num_sinks=4)


def cache(kv_dtype: str, head_dim: int, dtype: torch.dtype) -> TritonKVCache:
    scales = KVScales((torch.empty(NUM_KV_HEADS),), (torch.empty(NUM_KV_HEADS),))
    return TritonKVCache.allocate(64, BLOCK_SIZE, kv_dtype, (1, NUM_KV_HEADS, head_dim), dtype, META, scales)


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


def compile_decodes(
    monkeypatch: pytest.MonkeyPatch, arch: int, kv_dtype: str, head_dim: int, dtype: torch.dtype, sight: Sight, splits: int
) -> list[Compiled]:
    kv = cache(kv_dtype, head_dim, dtype)
    query_THD = torch.empty(NUM_TOKENS, NUM_HEADS, head_dim, dtype=dtype, device=META)
    decodes = Decodes(ints(NUM_TOKENS), ints(NUM_TOKENS), ints(NUM_TOKENS), ints(NUM_TOKENS, 16))
    sinks = query_THD if sight.num_sinks else None
    stores = (kv.keys.layer(0), kv.values.layer(0))
    return compile_all(
        monkeypatch,
        arch,
        lambda: attend_decodes(query_THD, sinks, decodes, *stores, sight, 0.1, splits, torch.empty_like(query_THD)),
    )


def compile_chunks(
    monkeypatch: pytest.MonkeyPatch, arch: int, kv_dtype: str, head_dim: int, dtype: torch.dtype, sight: Sight
) -> Compiled:
    kv = cache(kv_dtype, head_dim, dtype)
    query_THD = torch.empty(NUM_TOKENS, NUM_HEADS, head_dim, dtype=dtype, device=META)
    chunks = Chunks(ints(3), ints(3), ints(3), ints(3), ints(3, 16), ints(6), ints(6))
    sinks = query_THD if sight.num_sinks else None
    stores = (kv.keys.layer(0), kv.values.layer(0))
    [kernel] = compile_all(
        monkeypatch,
        arch,
        lambda: attend_chunks(query_THD, sinks, chunks, *stores, sight, 0.1, torch.empty_like(query_THD)),
    )
    return kernel


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_decodes_compile_in_every_cache_mode(monkeypatch: pytest.MonkeyPatch, arch: int, kv_dtype: str) -> None:
    attention, join = compile_decodes(monkeypatch, arch, kv_dtype, HEAD_DIM, torch.bfloat16, Sight(), splits=4)
    print(arch, kv_dtype, attention.registers, attention.shared_bytes, {i: attention.count(i) for i in ("LDG.E.128","LDG.E.64","LDG.E","LDGSTS.E.BYPASS.128","LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS.E.128", "LDGSTS", "HMMA","HGMMA")})
    assert attention.count("HMMA")


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_chunks_compile_in_every_cache_mode(monkeypatch: pytest.MonkeyPatch, arch: int, kv_dtype: str) -> None:
    attention = compile_chunks(monkeypatch, arch, kv_dtype, HEAD_DIM, torch.bfloat16, Sight())
    print(arch, kv_dtype, attention.registers, attention.shared_bytes, {i: attention.count(i) for i in ("LDG.E.128","LDG.E.64","LDG.E","LDGSTS.E.BYPASS.128","LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS.E.128", "LDGSTS", "HMMA","HGMMA")})
