"""Attention of sequences that decode: each has one new token, whose heads of a KV head form one tile.

Where sequences and KV heads are too few to fill the GPU, what is held of a sequence is split over several programs, and
a second kernel joins what they found (as in "Flash-Decoding", Dao, Haziza, Massa and Sizov 2023).

Shapes: T tokens of the step, S sequences that decode, B KV blocks of the longest table, H query heads, J KV heads,
D head_dim, U splits, M heads of a KV head, C dimensions of half a head, padded to a power of two.
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

# A split reads at least so many tokens, or joining costs more than it saves.
MIN_TOKENS_PER_SPLIT = 128
MAX_SPLITS = 32


class Decodes(NamedTuple):
    """Sequences with one new token each, all int64 on the device.

    ``rows_S`` are the tokens' rows of T, ``held_S`` how many tokens the blocks of a sequence hold (the new one
    included; 0 gives zeros), ``shift_S`` how many of its tokens were dropped, at most ``FAR``.
    """

    rows_S: Tensor
    held_S: Tensor
    shift_S: Tensor
    table_SB: Tensor


def num_splits(num_seqs: int, num_kv_heads: int, max_tokens: int, num_processors: int) -> int:
    """Over how many programs a sequence is split, by sizes known before its length is: no host waits for the device."""
    affordable = (2 * num_processors) // (num_seqs * num_kv_heads)
    return max(1, min(affordable, -(-max_tokens // MIN_TOKENS_PER_SPLIT), MAX_SPLITS))


def attend_decodes(
    query_THD: Tensor,
    sink_query_THD: Tensor | None,
    decodes: Decodes,
    keys: LayerStore,
    values: LayerStore,
    sight: Sight,
    softmax_scale: float,
    splits: int,
    out_THD: Tensor,
) -> None:
    """Write what the new tokens attend to into their rows of ``out_THD``, in the dtype of the queries.

    ``sink_query_THD`` are the queries as turned to meet sinks: there where ``sight`` has some.
    """
    num_seqs = len(decodes.rows_S)
    num_heads, head_dim = query_THD.shape[1:]
    partial = None
    if splits > 1:
        # Of each split: weighted sums, then the largest score and the sum of weights.
        partial = query_THD.new_empty((num_seqs, num_heads, splits, head_dim + 2), dtype=torch.float32)
    group = num_heads // keys.num_kv_heads
    entries = launch_table.DECODE[launch_table.architecture(query_THD.device)]
    entry = launch_table.attention_entry(entries, head_dim, query_THD.dtype)
    half_width = max(16, triton.next_power_of_2(head_dim // 2))
    decode_kernel[(num_seqs, keys.num_kv_heads, splits)](
        query_THD,
        sink_query_THD,
        *decodes,
        keys.codes,
        keys.parameters,
        keys.scale_J,
        values.codes,
        values.parameters,
        values.scale_J,
        out_THD,
        partial,
        decodes.table_SB.stride(0),
        softmax_scale * LOG2_E,
        *sight.arguments(keys.block_size),
        keys.num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=keys.block_size,
        HALF=head_dim // 2,
        C=half_width,
        M=max(entry.rows, triton.next_power_of_2(group)),
        TILE=entry.tile,
        KEY_KIND=kind_of(keys.rule),
        VALUE_KIND=kind_of(values.rule),
        HAS_SINKS=sight.num_sinks > 0,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
    )
    if partial is not None:
        join_kernel[(num_seqs, num_heads)](
            partial,
            decodes.rows_S,
            out_THD,
            num_heads,
            splits,
            HEAD_DIM=head_dim,
            D=triton.next_power_of_2(head_dim),
            U=triton.next_power_of_2(splits),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["window", "num_sinks", "num_first", "table_stride"])
def decode_kernel(
    query_ptr,
    sink_query_ptr,
    rows_ptr,
    held_ptr,
    shift_ptr,
    table_ptr,
    key_codes_ptr,
    key_parameters_ptr,
    key_scale_ptr,
    value_codes_ptr,
    value_parameters_ptr,
    value_scale_ptr,
    out_ptr,
    partial_ptr,
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
    """Program (s, j, u): the u-th part of what sequence s holds, for all query heads of KV head j."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    held = tl.load(held_ptr + seq).to(tl.int32)
    shift = tl.load(shift_ptr + seq).to(tl.int32)
    row = tl.load(rows_ptr + seq)
    own_table_ptr = table_ptr + seq.to(tl.int64) * table_stride
    heads_M = tl.arange(0, M)
    in_M = heads_M < GROUP
    num_heads = num_kv_heads * GROUP
    offsets_M = (row * num_heads + kv_head * GROUP + heads_M) * (2 * HALF)
    query_index_M = tl.zeros([M], tl.int32) + (held - 1)

    begin = first_seen(held - 1, window, num_sinks, num_first, shift)
    part_len = tl.cdiv(tl.cdiv(held - begin, tl.num_programs(2)), TILE) * TILE
    begin += split * part_len
    end = tl.minimum(begin + part_len, held)

    maximum_M, total_M, first_sum_MC, second_sum_MC = attend_sequence(
        query_ptr,
        sink_query_ptr,
        offsets_M,
        in_M,
        query_index_M,
        begin,
        end,
        tl.where(split == 0, tl.minimum(num_sinks, held), 0),
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
    if partial_ptr is None:
        divisor_M1 = tl.where(total_M == 0.0, 1.0, total_M)[:, None]
        store_halves(out_ptr, offsets_M, in_M, first_sum_MC / divisor_M1, second_sum_MC / divisor_M1, HALF, C)
    else:
        place_M = (seq.to(tl.int64) * num_heads + kv_head * GROUP + heads_M) * tl.num_programs(2) + split
        places_M = place_M * (2 * HALF + 2)
        store_halves(partial_ptr, places_M, in_M, first_sum_MC, second_sum_MC, HALF, C)
        tl.store(partial_ptr + places_M + 2 * HALF, maximum_M, mask=in_M)
        tl.store(partial_ptr + places_M + 2 * HALF + 1, total_M, mask=in_M)


@triton.jit(do_not_specialize=["num_splits"])
def join_kernel(
    partial_ptr,
    rows_ptr,
    out_ptr,
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    U: tl.constexpr,
):
    """Program (s, h): what the splits found for one head of one sequence, each weighted by its share."""
    seq, head = tl.program_id(0), tl.program_id(1)
    splits_U, dims_D = tl.arange(0, U), tl.arange(0, D)
    in_U = splits_U < num_splits
    in_D = dims_D < HEAD_DIM
    places_U = ((seq.to(tl.int64) * num_heads + head) * num_splits + splits_U) * (HEAD_DIM + 2)
    maximum_U = tl.load(partial_ptr + places_U + HEAD_DIM, mask=in_U, other=-float("inf"))
    total_U = tl.load(partial_ptr + places_U + HEAD_DIM + 1, mask=in_U, other=0.0)
    maximum = tl.max(maximum_U, 0)
    weight_U = tl.exp2(maximum_U - tl.where(maximum == -float("inf"), 0.0, maximum))
    sums_UD = tl.load(partial_ptr + places_U[:, None] + dims_D[None, :], mask=in_U[:, None] & in_D[None, :], other=0.0)
    total = tl.sum(total_U * weight_U, 0)
    attended_D = tl.sum(sums_UD * weight_U[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_ptrs_D = out_ptr + (tl.load(rows_ptr + seq) * num_heads + head) * HEAD_DIM + dims_D
    tl.store(out_ptrs_D, attended_D.to(out_ptr.dtype.element_ty), mask=in_D)
