"""Keys and values as the paged cache holds them, written and read inside kernels: the rules of ``formats.kv_mode``.

A head lies in memory as two halves, dimensions [0, D / 2) and [D / 2, D), because 4-bit codes of one half share their
bytes with those of the other. Every kernel works on both halves apart, in every mode, so that there is one way through.

Codes are multiplied as they are, and scales go to the scores (keys) or to the weights (values): integers up to 127 are
exact in every floating-point type, so nothing is rounded that the reference does not round.

Shapes: R rows (a token and head each), N tokens of a tile, C dimensions of half a head, padded to a power of two, J KV
heads, B blocks, b block_size, W elements that hold one head's codes, P parameters beside them.
Layout of one layer: codes [B, J, b, W], parameters [B, J, P, b], so that what a program reads of a block is contiguous.
"""

import triton
import triton.language as tl

from quantpipe.backends.triton.ops.rounding import ROUNDER, larger, largest_magnitude, row_scale, to_codes
from quantpipe.formats.kv_mode import KVRule

# How keys, or values, are held, as kernels know it.
FLOAT = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT8_STATIC = tl.constexpr(2)
INT4 = tl.constexpr(3)


def kind_of(rule: KVRule) -> int:
    """The kernels' number of a rule."""
    if rule.bits == 8:
        return int((INT8_STATIC if rule.is_static else INT8).value)
    return int((FLOAT if rule.bits is None else INT4).value)


@triton.jit
def store_head(
    first_RC,
    second_RC,
    codes_ptr,
    parameters_ptr,
    scale_ptr,
    slots_R,
    heads_R,
    in_R,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    KIND: tl.constexpr,
):
    """Encode float32 halves of heads, zero beyond HALF, and store them in their slots."""
    dims_C = tl.arange(0, C)
    in_RC = in_R[:, None] & (dims_C < HALF)[None, :]
    block_head_R = (slots_R // BLOCK_SIZE) * num_kv_heads + heads_R
    offset_R = slots_R % BLOCK_SIZE
    row_R = block_head_R * BLOCK_SIZE + offset_R
    if KIND == INT4:
        low_R, high_R = _range(first_RC, second_RC, in_RC)
        minimum_R = low_R.to(tl.float16).to(tl.float32)
        scale_R = tl.div_rn(high_R - minimum_R, tl.full(high_R.shape, 15.0, tl.float32)).to(tl.float16).to(tl.float32)
        divisor_R = tl.where(scale_R == 0.0, 1.0, scale_R)
        first_q_RC = _rounded(tl.div_rn(first_RC - minimum_R[:, None], _spread(divisor_R, first_RC)), 0.0, 15.0)
        second_q_RC = _rounded(tl.div_rn(second_RC - minimum_R[:, None], _spread(divisor_R, second_RC)), 0.0, 15.0)
        byte_RC = first_q_RC.to(tl.int32) | (second_q_RC.to(tl.int32) << 4)
        tl.store(codes_ptr + row_R[:, None] * HALF + dims_C[None, :], byte_RC.to(tl.uint8), mask=in_RC)
        parameter_R = block_head_R * (2 * BLOCK_SIZE) + offset_R
        tl.store(parameters_ptr + parameter_R, scale_R.to(tl.float16), mask=in_R)
        tl.store(parameters_ptr + parameter_R + BLOCK_SIZE, minimum_R.to(tl.float16), mask=in_R)
    else:
        code_ptrs_RC = codes_ptr + row_R[:, None] * (2 * HALF) + dims_C[None, :]
        if KIND == FLOAT:
            first_codes_RC = first_RC.to(codes_ptr.dtype.element_ty)
            second_codes_RC = second_RC.to(codes_ptr.dtype.element_ty)
        elif KIND == INT8:
            scale_R = row_scale(larger(largest_magnitude(first_RC), largest_magnitude(second_RC)), 127.0)
            first_codes_RC = to_codes(first_RC, scale_R)
            second_codes_RC = to_codes(second_RC, scale_R)
            tl.store(parameters_ptr + block_head_R * BLOCK_SIZE + offset_R, scale_R, mask=in_R)
        else:
            scale_R = tl.load(scale_ptr + heads_R, mask=in_R, other=1.0)
            first_codes_RC = _static_codes(first_RC, scale_R)
            second_codes_RC = _static_codes(second_RC, scale_R)
        tl.store(code_ptrs_RC, first_codes_RC, mask=in_RC)
        tl.store(code_ptrs_RC + HALF, second_codes_RC, mask=in_RC)


@triton.jit
def load_codes(codes_ptr, row_N, in_N, HALF: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Both halves [N, C] of the codes in rows of [b, W], as ``dtype``; 0 where ``in_N`` is false and beyond HALF."""
    dims_C = tl.arange(0, C)
    in_NC = in_N[:, None] & (dims_C < HALF)[None, :]
    if KIND == INT4:
        byte_NC = tl.load(codes_ptr + row_N[:, None] * HALF + dims_C[None, :], mask=in_NC, other=0).to(tl.int32)
        first_NC = (byte_NC & 15).to(dtype)
        second_NC = (byte_NC >> 4).to(dtype)
    else:
        code_ptrs_NC = codes_ptr + row_N[:, None] * (2 * HALF) + dims_C[None, :]
        first_codes_NC = tl.load(code_ptrs_NC, mask=in_NC, other=0)
        second_codes_NC = tl.load(code_ptrs_NC + HALF, mask=in_NC, other=0)
        first_NC = first_codes_NC.to(dtype)
        second_NC = second_codes_NC.to(dtype)
        if KIND == INT8_STATIC:  # the code of what was not finite
            first_NC = tl.where(first_codes_NC == -128, float("nan"), first_NC).to(dtype)
            second_NC = tl.where(second_codes_NC == -128, float("nan"), second_NC).to(dtype)
    return first_NC, second_NC


@triton.jit
def load_scales(
    parameters_ptr, scale_ptr, block_head_N, offset_N, in_N, head, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr
):
    """What codes are multiplied by, and what is added to them then [N] float32: 0 but for 4 bits, and where not in."""
    minimum_N = tl.zeros(offset_N.shape, tl.float32)
    if KIND == INT8:
        scale_N = tl.load(parameters_ptr + block_head_N * BLOCK_SIZE + offset_N, mask=in_N, other=0.0)
    elif KIND == INT8_STATIC:
        scale_N = minimum_N + tl.load(scale_ptr + head)
    else:
        parameter_ptrs_N = parameters_ptr + block_head_N * (2 * BLOCK_SIZE) + offset_N
        scale_N = tl.load(parameter_ptrs_N, mask=in_N, other=0.0).to(tl.float32)
        minimum_N = tl.load(parameter_ptrs_N + BLOCK_SIZE, mask=in_N, other=0.0).to(tl.float32)
    return scale_N, minimum_N


@triton.jit
def _rounded(x_RC, low: tl.constexpr, high: tl.constexpr):
    """Half to even, within bounds that are whole: the order of both does not matter then."""
    clamped_RC = tl.minimum(tl.maximum(x_RC, low), high)
    return (clamped_RC + ROUNDER) - ROUNDER


@triton.jit
def _spread(scale_R, like_RC):
    return tl.broadcast_to(scale_R[:, None], like_RC.shape)


@triton.jit
def _range(first_RC, second_RC, in_RC):
    """Least and largest value of each row; NaN where a value is one."""
    low_RC = tl.minimum(tl.where(in_RC, first_RC, float("inf")), tl.where(in_RC, second_RC, float("inf")))
    high_RC = tl.maximum(tl.where(in_RC, first_RC, -float("inf")), tl.where(in_RC, second_RC, -float("inf")))
    has_nan_R = _has_nan(first_RC, second_RC)
    low_R = tl.where(has_nan_R, float("nan"), tl.min(low_RC, 1))
    high_R = tl.where(has_nan_R, float("nan"), tl.max(high_RC, 1))
    return low_R, high_R


@triton.jit
def _has_nan(first_RC, second_RC):
    is_nan_RC = (first_RC != first_RC) | (second_RC != second_RC)
    return tl.max(is_nan_RC.to(tl.int32), 1) > 0


@triton.jit
def _static_codes(x_RC, scale_R):
    q_RC = _rounded(tl.div_rn(x_RC, _spread(scale_R, x_RC)), -127.0, 127.0)
    is_finite_RC = tl.abs(x_RC) < float("inf")
    return tl.where(is_finite_RC, q_RC, -128.0).to(tl.int8)
