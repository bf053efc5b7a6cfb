"""Attention of sequences with several new tokens each: prefill chunks of any lengths side by side, causal.

A tile holds as many tokens of one sequence as there is room for with all heads of a KV head.

Shapes: T tokens of the step, S sequences, B KV blocks of the longest table, X tiles, H query heads, J KV heads,
D head_dim, M rows of a tile (a token and a head each), C dimensions of half a head, padded to a power of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.kv_cache import LayerStore
from quantpipe.backends.triton.ops.attention_tile import (
    LOG2_E,
    Sight,
    attend_sequence,
    first_seen,
    store_halves,
)
from quantpipe.backends.triton.ops.kv_codes import kind_of


class Chunks(NamedTuple):
    """Sequences with several new tokens each, all int64 on the device.

    ``start_S`` are their first rows of T, ``query_len_S`` how many follow, ``held_S`` and ``shift_S`` as in
    ``Decodes``. Tile x is of sequence ``tile_seq_X``, from its new token number ``tile_first_X`` on.
    """

    start_S: Tensor
    query_len_S: Tensor
    held_S: Tensor
    shift_S: Tensor
    table_SB: Tensor
    tile_seq_X: Tensor
    tile_first_X: Tensor


def tokens_per_tile(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many new tokens of a sequence a tile holds, with all query heads of one KV head."""
    group = num_heads // num_kv_heads
    return _rows_per_tile(group, _entry(head_dim, dtype, device)) // group


def attend_chunks(
    query_THD: Tensor,
    sink_query_THD: Tensor | None,
    chunks: Chunks,
    keys: LayerStore,
    values: LayerStore,
    sight: Sight,
    softmax_scale: float,
    out_THD: Tensor,
) -> None:
    """Write what the new tokens attend to into their rows of ``out_THD``, in the dtype of the queries.

    ``sink_query_THD`` are the queries as turned to meet sinks: there where ``sight`` has some.
    """
    num_heads, head_dim = query_THD.shape[1:]
    group = num_heads // keys.num_kv_heads
    entry = _entry(head_dim, query_THD.dtype, query_THD.device)
    chunk_kernel[(len(chunks.tile_seq_X), keys.num_kv_heads)](
        query_THD,
        sink_query_THD,
        *chunks,
        keys.codes,
        keys.parameters,
        keys.scale_J,
        values.codes,
        values.parameters,
        values.scale_J,
        out_THD,
        chunks.table_SB.stride(0),
        softmax_scale * LOG2_E,
        *sight.arguments(keys.block_size),
        keys.num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=keys.block_size,
        HALF=head_dim // 2,
        C=max(16, triton.next_power_of_2(head_dim // 2)),
        M=_rows_per_tile(group, entry),
        TILE=entry.tile,
        KEY_KIND=kind_of(keys.rule),
        VALUE_KIND=kind_of(values.rule),
        HAS_SINKS=sight.num_sinks > 0,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
    )


def _entry(head_dim: int, dtype: torch.dtype, device: torch.device) -> launch_table.AttentionLaunch:
    entries = launch_table.CHUNK[launch_table.architecture(device)]
    return launch_table.attention_entry(entries, head_dim, dtype)


def _rows_per_tile(group: int, entry: launch_table.AttentionLaunch) -> int:
    return max(entry.rows, int(triton.next_power_of_2(group)))


@triton.jit(do_not_specialize=["window", "num_sinks", "num_first", "table_stride"])
def chunk_kernel(
    query_ptr,
    sink_query_ptr,
    start_ptr,
    query_len_ptr,
    held_ptr,
    shift_ptr,
    table_ptr,
    tile_seq_ptr,
    tile_first_ptr,
    key_codes_ptr,
    key_parameters_ptr,
    key_scale_ptr,
    value_codes_ptr,
    value_parameters_ptr,
    value_scale_ptr,
    out_ptr,
    table_stride,
    scale_log2,
    window,
    num_sinks,
    num_first,
    num_kv_heads,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (x, j): the tokens of tile x, for all query heads of KV head j."""
    kv_head = tl.program_id(1)
    seq = tl.load(tile_seq_ptr + tl.program_id(0))
    first_token = tl.load(tile_first_ptr + tl.program_id(0)).to(tl.int32)
    query_len = tl.load(query_len_ptr + seq).to(tl.int32)
    held = tl.load(held_ptr + seq).to(tl.int32)
    shift = tl.load(shift_ptr + seq).to(tl.int32)
    own_table_ptr = table_ptr + seq * table_stride

    rows_M = tl.arange(0, M)
    tokens_M = first_token + rows_M // GROUP
    in_M = (rows_M < M // GROUP * GROUP) & (tokens_M < query_len)
    query_heads_M = kv_head * GROUP + rows_M % GROUP
    offsets_M = ((tl.load(start_ptr + seq) + tokens_M) * (num_kv_heads * GROUP) + query_heads_M) * (2 * HALF)
    num_before = held - query_len
    query_index_M = num_before + tokens_M
    begin = first_seen(num_before + first_token, window, num_sinks, num_first, shift)
    end = tl.minimum(num_before + first_token + M // GROUP, held)

    _, total_M, first_sum_MC, second_sum_MC = attend_sequence(
        query_ptr,
        sink_query_ptr,
        offsets_M,
        in_M,
        query_index_M,
        begin,
        end,
        tl.minimum(num_sinks, end),
        window,
        num_first,
        shift,
        own_table_ptr,
        key_codes_ptr,
        key_parameters_ptr,
        key_scale_ptr,
        value_codes_ptr,
        value_parameters_ptr,
        value_scale_ptr,
        scale_log2,
        num_kv_heads,
        kv_head,
        BLOCK_SIZE,
        HALF,
        C,
        M,
        TILE,
        KEY_KIND,
        VALUE_KIND,
        HAS_SINKS,
    )
    divisor_M1 = tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    store_halves(out_ptr, offsets_M, in_M, first_sum_MC / divisor_M1, second_sum_MC / divisor_M1, HALF, C)
