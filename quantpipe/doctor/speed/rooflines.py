"""Each kernel at the shapes of a model: its time, and the share of it that the GPU's ceilings would need.

Shapes: T rows, N out_features, K in_features, S sequences, H query heads, J KV heads, D head_dim, B blocks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantpipe.backends.triton.kv_cache import TritonKVCache
from quantpipe.backends.triton.linear import TritonLinear, build_linear
from quantpipe.backends.triton.ops.activation import gated
from quantpipe.backends.triton.ops.attention_chunk import Chunks, attend_chunks, tokens_per_tile
from quantpipe.backends.triton.ops.attention_decode import Decodes, attend_decodes, num_splits
from quantpipe.backends.triton.ops.attention_tile import Sight
from quantpipe.backends.triton.ops.norm import rms_norm
from quantpipe.backends.triton.ops.rope_kv import Turns, rope_and_write
from quantpipe.backends.triton.ops.sampling import most_likely
from quantpipe.backends.triton.requirements import num_processors
from quantpipe.doctor.record import Row
from quantpipe.doctor.speed.ceilings import Ceilings, measure_ceilings
from quantpipe.doctor.speed.timer import Timer
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8
from quantpipe.models.weights import LinearWeights

BLOCK_SIZE, DIVISOR = 16, 127.0
SCHEMES: dict[str, WeightScheme | None] = {"bf16 (cuBLAS)": None, "w4a16 g128": w4a16(128), "w8a8": w8a8()}
KV_DTYPES = ("auto", "int8_per_token_head", "int4_per_token_head")
# Of the memory that is free, a cache of one layer takes no more than this.
_CACHE_SHARE = 0.4


@dataclass(frozen=True)
class Shapes:
    """One layer of a model, and the steps it is timed in."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    chunk_len: int
    dtype: torch.dtype = torch.bfloat16


EIGHT_BILLION = Shapes(
    4096, 14336, 32, 8, 128, 128_256, (1, 4, 16, 64, 256), (1024, 8192, 32_768), (1, 32, 128), chunk_len=512
)


@dataclass(frozen=True)
class Work:
    """One launch: bytes that it must at least read and write, and operations."""

    kernel: str
    what: str
    run: Callable[[], object]
    num_bytes: float
    num_ops: float = 0.0
    is_int8: bool = False


def roofline_rows(
    device: torch.device, timer: Timer, shapes: Shapes, ceilings: Ceilings | None = None
) -> Iterator[Row]:
    """Time in microseconds; ``share`` is what the slower of memory and arithmetic needs at least, of that time."""
    ceilings = ceilings or measure_ceilings(device, timer)
    for table in (linear_work, attention_work, row_work):
        for work in table(device, shapes):
            seconds = timer.seconds(work.run)
            least_s = ceilings.least_seconds(work.num_bytes, work.num_ops, work.is_int8)
            yield {
                "kernel": work.kernel,
                "shape": work.what,
                "us": round(seconds * 1e6, 2),
                "GB/s": round(work.num_bytes / seconds * 1e-9, 1),
                "share": round(least_s / seconds, 3),
            }


def random_linear(
    scheme: WeightScheme | None, num_out: int, num_in: int, device: torch.device, dtype: torch.dtype
) -> TritonLinear:
    """Weights that are drawn on the device."""
    if scheme is None:
        weight_NK = torch.randn(num_out, num_in, device=device, dtype=dtype)
        return build_linear([LinearWeights(weight_NK, None, None, None)], device, dtype, DIVISOR)
    q_NK = torch.randint(scheme.q_min, scheme.q_max + 1, (num_out, num_in), dtype=torch.int8, device=device)
    scale_NG = torch.rand(num_out, scheme.num_groups(num_in), device=device).to(torch.bfloat16)
    return build_linear([LinearWeights(q_NK, scale_NG, None, scheme)], device, dtype, DIVISOR)


def linear_work(device: torch.device, shapes: Shapes) -> Iterator[Work]:
    """Gate and up as one, and down, in every scheme, by number of rows."""
    sizes = ((2 * shapes.intermediate_size, shapes.hidden_size), (shapes.hidden_size, shapes.intermediate_size))
    for num_out, num_in in sizes:
        for name, scheme in SCHEMES.items():
            linear = random_linear(scheme, num_out, num_in, device, shapes.dtype)
            for rows in shapes.rows:
                x_TK = torch.randn(rows, num_in, device=device, dtype=shapes.dtype)
                moved = linear.weight_bytes + (num_in + num_out) * rows * x_TK.itemsize
                what, num_ops = f"M={rows} N={num_out} K={num_in}", 2.0 * rows * num_out * num_in
                is_int8 = scheme is not None and scheme.activation_bits is not None
                yield Work(f"linear {name}", what, partial(linear, x_TK), moved, num_ops, is_int8)
            del linear


def attention_work(device: torch.device, shapes: Shapes) -> Iterator[Work]:
    """Decodes by batch and context, and one chunk behind each context, over caches that fit."""
    for kv_dtype in KV_DTYPES:
        for context in shapes.contexts:
            for batch in shapes.batches:
                kv = _cache(device, shapes, kv_dtype, batch, context)
                if kv is None:
                    continue
                yield _decode_work(device, shapes, kv, batch, context)
                if batch == shapes.batches[0] and context > shapes.chunk_len:
                    yield _chunk_work(device, shapes, kv, context)
                del kv


def row_work(device: torch.device, shapes: Shapes) -> Iterator[Work]:
    """What works row by row, for the most rows."""
    rows, dtype = shapes.rows[-1], shapes.dtype
    x_TH, residual_TH = (torch.randn(rows, shapes.hidden_size, device=device, dtype=dtype) for _ in range(2))
    weight_H = torch.ones(shapes.hidden_size, device=device)
    yield Work("norm + residual", f"T={rows}", lambda: rms_norm(x_TH, weight_H, 1e-5, residual_TH), 4.0 * x_TH.nbytes)
    gate_up = torch.randn(rows, 2 * shapes.intermediate_size, device=device, dtype=dtype)
    yield Work("gate", f"T={rows}", lambda: gated(gate_up, "silu"), 1.5 * gate_up.nbytes)
    num_heads = shapes.num_heads + 2 * shapes.num_kv_heads
    heads_TX = torch.randn(rows, num_heads * shapes.head_dim, device=device, dtype=dtype)
    slots_T = torch.arange(rows, device=device)
    frequencies_P = torch.ones(shapes.head_dim // 2, dtype=torch.float64, device=device)
    turns = Turns.of(frequencies_P, 1.0, slots_T)
    for kv_dtype in KV_DTYPES:
        kv = _cache(device, shapes, kv_dtype, 1, rows)
        if kv is not None:
            write = partial(_write, heads_TX, turns, slots_T, kv, shapes.head_dim)
            yield Work("rope and KV write", f"T={rows} {kv_dtype}", write, 2.0 * heads_TX.nbytes)
    logits_RV = torch.randn(shapes.batches[-1], shapes.vocab_size, device=device)
    yield Work("most likely", f"R={shapes.batches[-1]}", lambda: most_likely(logits_RV), float(logits_RV.nbytes))


def _write(heads_TX: Tensor, turns: Turns, slots_T: Tensor, kv: TritonKVCache, head_dim: int) -> None:
    keys, values = kv.keys.layer(0), kv.values.layer(0)
    rope_and_write(heads_TX, turns, None, None, None, slots_T, keys, values, head_dim)


def _cache(device: torch.device, shapes: Shapes, kv_dtype: str, batch: int, context: int) -> TritonKVCache | None:
    """One layer that holds ``batch`` sequences; None where it would not fit."""
    num_blocks, sizes = batch * math.ceil(context / BLOCK_SIZE), (1, shapes.num_kv_heads, shapes.head_dim)
    full_bytes = 2 * num_blocks * BLOCK_SIZE * shapes.num_kv_heads * shapes.head_dim * shapes.dtype.itemsize
    if device.type == "cuda" and full_bytes > _CACHE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return None
    return TritonKVCache.allocate(num_blocks, BLOCK_SIZE, kv_dtype, sizes, shapes.dtype, device, None)


def _decode_work(device: torch.device, shapes: Shapes, kv: TritonKVCache, batch: int, context: int) -> Work:
    query_THD = torch.randn(batch, shapes.num_heads, shapes.head_dim, device=device, dtype=shapes.dtype)
    out_THD, rows_S = torch.empty_like(query_THD), torch.arange(batch, device=device)
    table_SB = torch.randperm(kv.num_blocks, device=device).view(batch, -1)
    decodes = Decodes(rows_S, torch.full_like(rows_S, context), torch.zeros_like(rows_S), table_SB)
    stores = (kv.keys.layer(0), kv.values.layer(0))
    splits = num_splits(batch, shapes.num_kv_heads, context, num_processors(device))
    num_ops = 4.0 * batch * context * shapes.num_heads * shapes.head_dim
    return Work(
        "attention of decodes",
        f"S={batch} C={context} {kv.dtype}",
        lambda: attend_decodes(query_THD, None, decodes, *stores, Sight(), 0.1, splits, out_THD),
        kv.num_bytes + 2.0 * query_THD.nbytes,
        num_ops,
    )


def _chunk_work(device: torch.device, shapes: Shapes, kv: TritonKVCache, context: int) -> Work:
    """One sequence reads ``chunk_len`` tokens that end at ``context``."""
    length, heads = shapes.chunk_len, (shapes.num_heads, shapes.head_dim)
    query_THD = torch.randn(length, *heads, device=device, dtype=shapes.dtype)
    out_THD = torch.empty_like(query_THD)
    tile_len = tokens_per_tile(shapes.num_heads, shapes.num_kv_heads, shapes.head_dim, shapes.dtype, device)
    first_X = torch.arange(0, length, tile_len, device=device)

    def one(value: int) -> Tensor:
        return torch.tensor([value], device=device)

    table_SB = torch.randperm(kv.num_blocks, device=device).view(1, -1)
    chunks = Chunks(one(0), one(length), one(context), one(0), table_SB, torch.zeros_like(first_X), first_X)
    stores = (kv.keys.layer(0), kv.values.layer(0))
    seen = length * (context - length) + length * (length + 1) / 2
    return Work(
        "attention of a chunk",
        f"T={length} C={context} {kv.dtype}",
        lambda: attend_chunks(query_THD, None, chunks, *stores, Sight(), 0.1, out_THD),
        kv.num_bytes + 2.0 * query_THD.nbytes,
        4.0 * seen * shapes.num_heads * shapes.head_dim,
    )
