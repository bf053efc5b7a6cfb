"""Rope and the write into the KV cache, in every mode, and copies of blocks.

Shapes: T tokens, H query heads, J KV heads, D head_dim, P pairs of dimensions that turn, B blocks, b block_size.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quantpipe.backends.triton.kv_cache import LayerStore, TritonKVCache
from quantpipe.backends.triton.ops.rope_kv import Turns, rope_and_write
from quantpipe.doctor.cases.case import ROUNDING, Case, code_error, error, generator, inequality
from quantpipe.formats.kv_mode import KV_MODES
from quantpipe.formats.kv_rounding import decode_kv
from quantpipe.formats.kv_scales import KVScales

NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 16, 4
# A head size that is a power of two, all of it turned, and one that is not, turned in part.
SHAPES = ((128, 64), (48, 8))
POSITIONS, SLOTS = (0, 7, 4000, 3, 31), (18, 0, 63, -1, 5)
# Minima and scales of four bits are kept in float16.
SLACK = {None: 0.0, 8: 1e-5, 4: 2e-3}


def cache_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Every mode with every head size, and blocks that are copied onto each other's sources."""
    for dtype in dtypes:
        for kv_dtype in KV_MODES:
            for head_dim, num_pairs in SHAPES:
                what = f"{kv_dtype} D={head_dim}"
                yield Case("rope and KV write", dtype, what, partial(_write, kv_dtype, head_dim, num_pairs, dtype))
        yield Case("copy of blocks", dtype, "int4_per_token_head", partial(_copy, dtype))


def cache(kv_dtype: str, head_dim: int, dtype: torch.dtype, num_blocks: int, device: torch.device) -> TritonKVCache:
    """One layer, static scales that cover values up to 5."""
    scale_J = torch.full((NUM_KV_HEADS,), 5 / 127)
    sizes = (1, NUM_KV_HEADS, head_dim)
    scales = KVScales((scale_J,), (2 * scale_J,))
    return TritonKVCache.allocate(num_blocks, BLOCK_SIZE, kv_dtype, sizes, dtype, device, scales)


def held_values(store: LayerStore, blocks_T: Tensor, offsets_T: Tensor) -> tuple[Tensor, Tensor]:
    """What the store means at some places, and the step between two codes there; float64 [T, J, D] and [T, J, 1]."""
    codes_TJC = store.codes.cpu()[blocks_T, :, offsets_T]
    parameters_TJP = None if store.parameters is None else store.parameters.cpu()[blocks_T, :, :, offsets_T]
    scale_J1 = None if store.scale_J is None else store.scale_J.cpu().unsqueeze(-1)
    values_TJD = decode_kv(codes_TJC, parameters_TJP, store.rule, scale_J1).double()
    if store.rule.bits is None:
        step = torch.zeros(1)
    elif parameters_TJP is None:
        assert scale_J1 is not None
        step = scale_J1
    else:
        step = parameters_TJP[..., :1]
    return values_TJD, step


def _write(kv_dtype: str, head_dim: int, num_pairs: int, dtype: torch.dtype, device: torch.device) -> float:
    kv = cache(kv_dtype, head_dim, dtype, NUM_BLOCKS, device)
    heads_THD = torch.randn(len(SLOTS), NUM_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=generator()).to(dtype)
    frequencies_P = 10_000.0 ** -(torch.arange(num_pairs, dtype=torch.float64) / num_pairs)
    positions_T, slots_T = torch.tensor(POSITIONS), torch.tensor(SLOTS)
    turns = Turns.of(frequencies_P.to(device), 1.0, positions_T.to(device))
    stores = (kv.keys.layer(0), kv.values.layer(0))
    query_THD, _ = rope_and_write(
        heads_THD.flatten(1).to(device), turns, None, None, None, slots_T.to(device), *stores, head_dim
    )
    turned_THD = _turned(heads_THD.double(), positions_T, frequencies_P)
    is_written_T = slots_T >= 0
    blocks_T, offsets_T = slots_T[is_written_T] // BLOCK_SIZE, slots_T[is_written_T] % BLOCK_SIZE
    wanted_keys = turned_THD[is_written_T, NUM_HEADS:-NUM_KV_HEADS]
    wanted_values = heads_THD[is_written_T, -NUM_KV_HEADS:].double()
    errors = [error(query_THD, turned_THD[:, :NUM_HEADS], ROUNDING[dtype])]
    for store, wanted in zip(stores, (wanted_keys, wanted_values), strict=True):
        found, step = held_values(store, blocks_T, offsets_T)
        slack = SLACK[store.rule.bits] or ROUNDING[dtype]
        errors.append(code_error(found, step, wanted, slack))
        num_rows_written = int((store.codes != 0).any(-1).any(1).sum())
        errors.append(2.0 * (num_rows_written > int(is_written_T.sum())))
    return max(errors)


def _turned(x_THD: Tensor, positions_T: Tensor, frequencies_P: Tensor) -> Tensor:
    """The first 2P dimensions turned in pairs (i, i + P), in float64."""
    angles_T1P = (positions_T.double()[:, None] * frequencies_P).unsqueeze(1)
    num_pairs = len(frequencies_P)
    first, second, rest = x_THD.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    cos, sin = angles_T1P.cos(), angles_T1P.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _copy(dtype: torch.dtype, device: torch.device) -> float:
    """1 -> 0 and 0 -> 2 at once: sources are read as they were."""
    kv = cache("int4_per_token_head", 48, dtype, NUM_BLOCKS, device)
    pools = [pool for store in (kv.keys, kv.values) for pool in store.tensors]
    before = []
    for pool in pools:
        pool.copy_(torch.randint(0, 100, pool.shape, generator=generator()))
        before.append(pool.cpu().clone())
    kv.copy_blocks([(1, 0), (0, 2)])
    return max(
        inequality(pool, held[:, [1, 1, 0, *range(3, NUM_BLOCKS)]]) for pool, held in zip(pools, before, strict=True)
    )
