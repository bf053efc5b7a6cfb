"""Norms queries and keys per head, turns them by rope, and writes keys and values into the paged cache, in one kernel.

Shapes: T tokens, H query heads, J KV heads, D head_dim, P pairs of dimensions that turn, R rows of a program (a token
and head each), C dimensions of half a head, padded to a power of two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.kv_cache import LayerStore
from quantpipe.backends.triton.ops.kv_codes import kind_of, store_head


class Turns(NamedTuple):
    """Cosines and sines of each token's angles, float32 [T, P] each, times the rope's attention scale."""

    cos_TP: Tensor
    sin_TP: Tensor

    @classmethod
    def of(cls, inverse_frequencies_P: Tensor, attention_scale: float, positions_T: Tensor) -> "Turns":
        """Angles in float64 (``inverse_frequencies_P`` as well): differences of far positions stay what they are."""
        angles_TP = positions_T.double().unsqueeze(-1) * inverse_frequencies_P
        return cls(angles_TP.cos().float() * attention_scale, angles_TP.sin().float() * attention_scale)


class HeadNorm(NamedTuple):
    """RMS norm of single heads: float32 weight [D], and epsilon."""

    weight_D: Tensor
    eps: float


def rope_and_write(
    heads_TX: Tensor,
    turns: Turns,
    sink_turns: Turns | None,
    query_norm: HeadNorm | None,
    key_norm: HeadNorm | None,
    slots_T: Tensor,
    keys: LayerStore,
    values: LayerStore,
    head_dim: int,
) -> tuple[Tensor, Tensor | None]:
    """Queries [T, H, D] as turned by ``turns``, and as turned by ``sink_turns`` where there are any.

    ``heads_TX`` [T, (H + 2J) * D] holds queries, keys and values of each token, one behind the other. Keys and values
    go to the slots ``slots_T`` (int64; block * block_size + offset); a token whose slot is below 0 is not written.
    """
    num_tokens, num_kv_heads = heads_TX.shape[0], keys.num_kv_heads
    num_heads = heads_TX.shape[1] // head_dim - 2 * num_kv_heads
    query_THD = torch.empty(num_tokens, num_heads, head_dim, dtype=heads_TX.dtype, device=heads_TX.device)
    sink_query_THD = None if sink_turns is None else torch.empty_like(query_THD)
    num_programs = triton.cdiv(num_tokens * num_heads, launch_table.ROPE_ROWS)
    num_programs += 2 * triton.cdiv(num_tokens * num_kv_heads, launch_table.ROPE_ROWS)
    rope_kv_kernel[(num_programs,)](
        heads_TX,
        turns.cos_TP,
        turns.sin_TP,
        None if sink_turns is None else sink_turns.cos_TP,
        None if sink_turns is None else sink_turns.sin_TP,
        None if query_norm is None else query_norm.weight_D,
        None if key_norm is None else key_norm.weight_D,
        0.0 if query_norm is None else query_norm.eps,
        0.0 if key_norm is None else key_norm.eps,
        slots_T,
        query_THD,
        sink_query_THD,
        keys.codes,
        keys.parameters,
        keys.scale_J,
        values.codes,
        values.parameters,
        values.scale_J,
        num_tokens,
        num_heads,
        num_kv_heads,
        NUM_PAIRS=turns.cos_TP.shape[1],
        BLOCK_SIZE=keys.block_size,
        HALF=head_dim // 2,
        C=triton.next_power_of_2(head_dim // 2),
        ROWS=launch_table.ROPE_ROWS,
        KEY_KIND=kind_of(keys.rule),
        VALUE_KIND=kind_of(values.rule),
        num_warps=4,
    )
    return query_THD, sink_query_THD


@triton.jit(do_not_specialize=["num_tokens"])
def rope_kv_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    sink_cos_ptr,
    sink_sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    query_eps,
    key_eps,
    slots_ptr,
    query_ptr,
    sink_query_ptr,
    key_codes_ptr,
    key_parameters_ptr,
    key_scale_ptr,
    value_codes_ptr,
    value_parameters_ptr,
    value_scale_ptr,
    num_tokens,
    num_heads,
    num_kv_heads,
    NUM_PAIRS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
):
    """First the programs of queries, then those of keys, then those of values; ROWS tokens and heads each."""
    program = tl.program_id(0)
    num_query_programs = tl.cdiv(num_tokens * num_heads, ROWS)
    num_key_programs = tl.cdiv(num_tokens * num_kv_heads, ROWS)
    stride = (num_heads + 2 * num_kv_heads) * (2 * HALF)
    rows_R = tl.arange(0, ROWS)
    dims_C = tl.arange(0, C)
    if program < num_query_programs:
        rows_R += program * ROWS
        in_R = rows_R < num_tokens * num_heads
        tokens_R = (rows_R // num_heads).to(tl.int64)
        row_ptrs_R = heads_ptr + tokens_R * stride + (rows_R % num_heads) * (2 * HALF)
        first_RC, second_RC = _turned(
            row_ptrs_R, tokens_R, in_R, query_norm_ptr, query_eps, cos_ptr, sin_ptr, NUM_PAIRS, HALF, C
        )
        offsets_RC = rows_R.to(tl.int64)[:, None] * (2 * HALF) + dims_C[None, :]
        in_RC = in_R[:, None] & (dims_C < HALF)[None, :]
        tl.store(query_ptr + offsets_RC, first_RC.to(query_ptr.dtype.element_ty), mask=in_RC)
        tl.store(query_ptr + offsets_RC + HALF, second_RC.to(query_ptr.dtype.element_ty), mask=in_RC)
        if sink_query_ptr is not None:
            first_RC, second_RC = _turned(
                row_ptrs_R, tokens_R, in_R, query_norm_ptr, query_eps, sink_cos_ptr, sink_sin_ptr, NUM_PAIRS, HALF, C
            )
            tl.store(sink_query_ptr + offsets_RC, first_RC.to(sink_query_ptr.dtype.element_ty), mask=in_RC)
            tl.store(sink_query_ptr + offsets_RC + HALF, second_RC.to(sink_query_ptr.dtype.element_ty), mask=in_RC)
    elif program < num_query_programs + num_key_programs:
        rows_R += (program - num_query_programs) * ROWS
        in_R = rows_R < num_tokens * num_kv_heads
        tokens_R = (rows_R // num_kv_heads).to(tl.int64)
        kv_heads_R = rows_R % num_kv_heads
        row_ptrs_R = heads_ptr + tokens_R * stride + (num_heads + kv_heads_R) * (2 * HALF)
        slots_R = tl.load(slots_ptr + tokens_R, mask=in_R, other=-1)
        first_RC, second_RC = _turned(
            row_ptrs_R, tokens_R, in_R, key_norm_ptr, key_eps, cos_ptr, sin_ptr, NUM_PAIRS, HALF, C
        )
        store_head(
            first_RC,
            second_RC,
            key_codes_ptr,
            key_parameters_ptr,
            key_scale_ptr,
            slots_R,
            kv_heads_R,
            slots_R >= 0,
            num_kv_heads,
            BLOCK_SIZE,
            HALF,
            C,
            KEY_KIND,
        )
    else:
        rows_R += (program - num_query_programs - num_key_programs) * ROWS
        in_R = rows_R < num_tokens * num_kv_heads
        tokens_R = (rows_R // num_kv_heads).to(tl.int64)
        kv_heads_R = rows_R % num_kv_heads
        row_ptrs_R = heads_ptr + tokens_R * stride + (num_heads + num_kv_heads + kv_heads_R) * (2 * HALF)
        slots_R = tl.load(slots_ptr + tokens_R, mask=in_R, other=-1)
        in_RC = in_R[:, None] & (dims_C < HALF)[None, :]
        ptrs_RC = row_ptrs_R[:, None] + dims_C[None, :]
        store_head(
            tl.load(ptrs_RC, mask=in_RC, other=0.0).to(tl.float32),
            tl.load(ptrs_RC + HALF, mask=in_RC, other=0.0).to(tl.float32),
            value_codes_ptr,
            value_parameters_ptr,
            value_scale_ptr,
            slots_R,
            kv_heads_R,
            slots_R >= 0,
            num_kv_heads,
            BLOCK_SIZE,
            HALF,
            C,
            VALUE_KIND,
        )


@triton.jit
def _turned(
    row_ptrs_R,
    tokens_R,
    in_R,
    norm_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    NUM_PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
):
    """Both halves of heads, normed where there is a norm, and turned; float32, zero beyond HALF."""
    dims_C = tl.arange(0, C)
    rstd_R = tl.zeros(in_R.shape, tl.float32) + 1.0
    if norm_ptr is not None:
        in_RC = in_R[:, None] & (dims_C < HALF)[None, :]
        ptrs_RC = row_ptrs_R[:, None] + dims_C[None, :]
        first_RC = tl.load(ptrs_RC, mask=in_RC, other=0.0).to(tl.float32)
        second_RC = tl.load(ptrs_RC + HALF, mask=in_RC, other=0.0).to(tl.float32)
        mean_R = tl.sum(first_RC * first_RC + second_RC * second_RC, 1) / (2 * HALF)
        rstd_R = tl.rsqrt(mean_R + eps)
    first_RC = _turned_half(
        row_ptrs_R, tokens_R, in_R, dims_C, dims_C < HALF, norm_ptr, rstd_R, cos_ptr, sin_ptr, NUM_PAIRS
    )
    second_RC = _turned_half(
        row_ptrs_R, tokens_R, in_R, dims_C + HALF, dims_C < HALF, norm_ptr, rstd_R, cos_ptr, sin_ptr, NUM_PAIRS
    )
    return first_RC, second_RC


@triton.jit
def _turned_half(row_ptrs_R, tokens_R, in_R, dims_C, in_C, norm_ptr, rstd_R, cos_ptr, sin_ptr, NUM_PAIRS: tl.constexpr):
    """Dimensions ``dims_C`` of heads: i and i + P turn together, those from 2P on stay."""
    is_first_C = dims_C < NUM_PAIRS
    partner_C = tl.where(is_first_C, dims_C + NUM_PAIRS, dims_C - NUM_PAIRS)
    pair_C = tl.where(is_first_C, dims_C, partner_C)
    in_RC = in_R[:, None] & in_C[None, :]
    turns_C = in_C & (dims_C < 2 * NUM_PAIRS)
    turns_RC = in_R[:, None] & turns_C[None, :]
    x_RC = tl.load(row_ptrs_R[:, None] + dims_C[None, :], mask=in_RC, other=0.0).to(tl.float32)
    partner_RC = tl.load(row_ptrs_R[:, None] + partner_C[None, :], mask=turns_RC, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x_RC = x_RC * rstd_R[:, None] * tl.load(norm_ptr + dims_C, mask=in_C, other=0.0)[None, :]
        partner_RC = partner_RC * rstd_R[:, None] * tl.load(norm_ptr + partner_C, mask=turns_C, other=0.0)[None, :]
    turn_RC = tokens_R[:, None] * NUM_PAIRS + pair_C[None, :]
    cos_RC = tl.load(cos_ptr + turn_RC, mask=turns_RC, other=1.0)
    sin_RC = tl.load(sin_ptr + turn_RC, mask=turns_RC, other=0.0)
    turned_RC = tl.where(is_first_C[None, :], x_RC * cos_RC - partner_RC * sin_RC, x_RC * cos_RC + partner_RC * sin_RC)
    return tl.where(turns_RC, turned_RC, x_RC)
