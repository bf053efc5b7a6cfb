"""Attention, and what writes the cache that it reads, compiled for each architecture with every entry that it has."""

from typing import NamedTuple

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
HEAD_DIM = 128
SINKS = Sight(window=1024, num_sinks=4)


def cache(kv_dtype: str, head_dim: int, dtype: torch.dtype) -> TritonKVCache:
    scales = KVScales((torch.empty(NUM_KV_HEADS),), (torch.empty(NUM_KV_HEADS),))
    return TritonKVCache.allocate(64, BLOCK_SIZE, kv_dtype, (1, NUM_KV_HEADS, head_dim), dtype, META, scales)


def ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=META)


def compile_decodes(
    monkeypatch: pytest.MonkeyPatch,
    arch: int,
    kv_dtype: str,
    head_dim: int,
    dtype: torch.dtype,
    sight: Sight,
    splits: int,
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


class Case(NamedTuple):
    """What kernels are compiled for."""

    kv_dtype: str
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    sight: Sight = Sight()


# Every cache mode, every entry of the launch table, with sinks and without.
CASES = [
    Case("auto"),
    Case("k_int8_v_int4", sight=SINKS),
    Case("int8_static", head_dim=256),
    Case("int8_per_token_head"),
    Case("int4_per_token_head", head_dim=64, dtype=torch.float16),
    Case("auto", dtype=torch.float32),
    Case("int4_per_token_head", head_dim=256, dtype=torch.float32),
]
# What differs from sm_80 on sm_86 and sm_89 is how much shared memory there is.
ONLY_SMALLER = CASES[:3]


def cases_of(arch: int) -> list[Case]:
    return ONLY_SMALLER if arch in (86, 89) else CASES


def test_decodes_compile(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    for case in cases_of(arch):
        attention, _ = compile_decodes(monkeypatch, arch, *case, splits=4)
        if case.dtype == torch.float32:  # no tensor cores, and no room to read ahead
            continue
        assert attention.count("HMMA"), f"{case}: no tensor cores"
        assert "cp.async.cg.shared.global" in attention.ptx, f"{case}: the cache is not read ahead, 16 bytes at a time"


def test_chunks_compile(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    for case in cases_of(arch):
        attention = compile_chunks(monkeypatch, arch, *case)
        tensor_cores = {90: "HGMMA", 100: "UTCHMMA"}.get(arch, "HMMA")
        assert attention.count(tensor_cores) or case.dtype == torch.float32, case


@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_rope_and_write_compiles(monkeypatch: pytest.MonkeyPatch, arch: int, kv_dtype: str) -> None:
    kv = cache(kv_dtype, HEAD_DIM, torch.bfloat16)
    heads_TX = torch.empty(NUM_TOKENS, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=torch.bfloat16, device=META)
    turns = Turns(*(torch.empty(NUM_TOKENS, HEAD_DIM // 2, device=META) for _ in range(2)))
    norm = HeadNorm(torch.empty(HEAD_DIM, device=META), 1e-6)
    stores = (kv.keys.layer(0), kv.values.layer(0))
    [kernel] = compile_all(
        monkeypatch,
        arch,
        lambda: rope_and_write(heads_TX, turns, turns, norm, norm, ints(NUM_TOKENS), *stores, HEAD_DIM),
    )
    assert kv_dtype == "auto" or "div.rn.f32" in kernel.ptx, "codes would differ from those of other backends"
