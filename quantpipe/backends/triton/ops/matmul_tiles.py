"""What the matrix products of this backend share: which tile a program computes, and what is done to finished sums.

Where K is split, each part leaves its sums in a buffer of its own and a second kernel adds them in order, so that the
same input gives the same output every time.

Shapes: T rows, N out_features, S parts of K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that follow each other take so many tiles of rows before the next tile of output features, so that what they
# read is still in the cache.
GROUPED_TILES = tl.constexpr(8)


@triton.jit
def tile_of(program, num_row_tiles, num_out_tiles):
    """(tile of rows, tile of output features) of a program."""
    programs_per_group = GROUPED_TILES * num_out_tiles
    first = program // programs_per_group * GROUPED_TILES
    group_size = tl.minimum(num_row_tiles - first, GROUPED_TILES)
    inside = program % programs_per_group
    return first + inside % group_size, inside // group_size


@triton.jit
def finished(sum_TN, row_T, out_N, num_rows, num_out, row_scale_ptr, out_scale_ptr, bias_ptr):
    """sum * (scale of the output feature) * (scale of the row) + bias in float32; each where there is one."""
    y_TN = sum_TN.to(tl.float32)
    if out_scale_ptr is not None:
        y_TN = y_TN * tl.load(out_scale_ptr + out_N, out_N < num_out, other=0.0).to(tl.float32)[None, :]
    if row_scale_ptr is not None:
        y_TN = y_TN * tl.load(row_scale_ptr + row_T, row_T < num_rows, other=0.0)[:, None]
    if bias_ptr is not None:
        y_TN = y_TN + tl.load(bias_ptr + out_N, out_N < num_out, other=0.0)[None, :]
    return y_TN


@triton.jit
def store_tile(
    sum_TN, row_T, out_N, num_rows, num_out, y_ptr, y_stride, partial_ptr, row_scale_ptr, out_scale_ptr, bias_ptr
):
    """Writes finished sums to y; or as they are to this part's share of ``partial`` [S, T, N], where there is one."""
    mask_TN = (row_T < num_rows)[:, None] & (out_N < num_out)[None, :]
    wide_T1 = row_T.to(tl.int64)[:, None]
    if partial_ptr is not None:
        part = partial_ptr + tl.program_id(1).to(tl.int64) * num_rows * num_out
        tl.store(part + wide_T1 * num_out + out_N[None, :], sum_TN, mask_TN)
    else:
        y_TN = finished(sum_TN, row_T, out_N, num_rows, num_out, row_scale_ptr, out_scale_ptr, bias_ptr)
        tl.store(y_ptr + wide_T1 * y_stride + out_N[None, :], y_TN.to(y_ptr.dtype.element_ty), mask_TN)


@triton.jit
def _add_parts_kernel(
    partial_ptr,
    y_ptr,
    y_stride,
    row_scale_ptr,
    out_scale_ptr,
    bias_ptr,
    num_rows,
    num_out,
    NUM_PARTS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    row_T = tl.program_id(0) + tl.arange(0, 1)
    out_N = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    mask_TN = (row_T < num_rows)[:, None] & (out_N < num_out)[None, :]
    cell_TN = row_T.to(tl.int64)[:, None] * num_out + out_N[None, :]
    sum_TN = tl.load(partial_ptr + cell_TN, mask_TN, other=0)
    for part in tl.static_range(1, NUM_PARTS):
        start = partial_ptr + part * tl.cast(num_rows, tl.int64) * num_out
        sum_TN += tl.load(start + cell_TN, mask_TN, other=0)
    store_tile(sum_TN, row_T, out_N, num_rows, num_out, y_ptr, y_stride, None, row_scale_ptr, out_scale_ptr, bias_ptr)


def add_parts(
    partial_STN: Tensor, y_TN: Tensor, row_scale_T: Tensor | None, out_scale_N: Tensor | None, bias_N: Tensor | None
) -> None:
    """Write the finished sums over S into ``y_TN``, whose rows may lie apart."""
    num_parts, num_rows, num_out = partial_STN.shape
    block_out = 512
    _add_parts_kernel[(num_rows, triton.cdiv(num_out, block_out))](
        partial_STN,
        y_TN,
        y_TN.stride(0),
        row_scale_T,
        out_scale_N,
        bias_N,
        num_rows,
        num_out,
        NUM_PARTS=num_parts,
        BLOCK_OUT=block_out,
        num_warps=4,
        enable_fp_fusion=False,
    )


def partial_sums(num_parts: int, y_TN: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Room for the sums of each part; None where K is not split."""
    if num_parts == 1:
        return None
    return torch.empty(num_parts, *y_TN.shape, dtype=dtype, device=y_TN.device)
