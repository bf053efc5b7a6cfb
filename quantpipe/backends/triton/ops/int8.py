"""8-bit weights under 8-bit activations: products of integers, summed exactly, then scaled.

Codes, sums and scaled results are those of the CPU backend bit for bit: integers have one sum, and what follows is the
same float32 operations in the same order, none fused with another.

Shapes: T rows, N out_features, K in_features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.launch_table import MatmulLaunch
from quantpipe.backends.triton.ops.matmul_tiles import add_parts, partial_sums, store_tile, tile_of
from quantpipe.backends.triton.ops.rounding import larger, largest_magnitude, row_scale, to_codes

MAX_BLOCK_SIZE = 4096
# Rows of weights begin at multiples of so many bytes, so that they are read 16 at a time.
ROW_ALIGNMENT = 16


@triton.jit
def _quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    divisor,
    num_rows,
    x_stride,
    size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row_T = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    wide_T1, is_row_T1 = row_T.to(tl.int64)[:, None], (row_T < num_rows)[:, None]
    largest_T = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, size, BLOCK_SIZE):
        column_K = start + tl.arange(0, BLOCK_SIZE)
        mask_TK = is_row_T1 & (column_K < size)[None, :]
        x_TK = tl.load(x_ptr + wide_T1 * x_stride + column_K[None, :], mask_TK, other=0.0).to(tl.float32)
        largest_T = larger(largest_T, largest_magnitude(x_TK))
    scale_T = row_scale(largest_T, divisor)
    tl.store(scale_ptr + row_T, scale_T, row_T < num_rows)
    for start in range(0, size, BLOCK_SIZE):
        column_K = start + tl.arange(0, BLOCK_SIZE)
        mask_TK = is_row_T1 & (column_K < size)[None, :]
        x_TK = tl.load(x_ptr + wide_T1 * x_stride + column_K[None, :], mask_TK, other=0.0).to(tl.float32)
        tl.store(codes_ptr + wide_T1 * size + column_K[None, :], to_codes(x_TK, scale_T), mask_TK)


@triton.jit
def _int8_matmul_kernel(
    x_ptr,
    weight_ptr,
    row_scale_ptr,
    out_scale_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    num_rows,
    num_out,
    num_in,
    weight_stride,
    y_stride,
    steps_per_part,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
):
    row_tile, out_tile = tile_of(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_out, BLOCK_OUT))
    row_T = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out_N = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Rows beyond the last read the first ones again; what comes of it is not stored.
    x_T1 = x_ptr + (row_T % num_rows).to(tl.int64)[:, None] * num_in
    weight_N1 = weight_ptr + (out_N % num_out).to(tl.int64)[:, None] * weight_stride
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.int32)
    else:
        acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.int32)
    first = tl.program_id(1) * steps_per_part
    for step in range(first, tl.minimum(first + steps_per_part, tl.cdiv(num_in, BLOCK_IN))):
        column_K = step * BLOCK_IN + tl.arange(0, BLOCK_IN)
        if IS_EVEN:
            x_TK = tl.load(x_T1 + column_K[None, :])
            weight_NK = tl.load(weight_N1 + column_K[None, :])
        else:
            x_TK = tl.load(x_T1 + column_K[None, :], (column_K < num_in)[None, :], other=0)
            weight_NK = tl.load(weight_N1 + column_K[None, :], (column_K < num_in)[None, :], other=0)
        if IS_SWAPPED:
            acc = tl.dot(weight_NK, tl.trans(x_TK), acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(x_TK, tl.trans(weight_NK), acc, out_dtype=tl.int32)
    if IS_SWAPPED:
        acc = tl.trans(acc)
    store_tile(
        acc, row_T, out_N, num_rows, num_out, y_ptr, y_stride, partial_ptr, row_scale_ptr, out_scale_ptr, bias_ptr
    )


def quantize_activations(x_TK: Tensor, activation_divisor: float) -> tuple[Tensor, Tensor]:
    """int8 codes [T, K] and float32 scales [T] of ``formats.layout.quantize_activations``; x's rows may lie apart."""
    assert x_TK.stride(1) == 1, "a row is contiguous"
    num_rows, size = x_TK.shape
    codes_TK = torch.empty(num_rows, size, dtype=torch.int8, device=x_TK.device)
    scale_T = torch.empty(num_rows, dtype=torch.float32, device=x_TK.device)
    if num_rows:
        entry = launch_table.rows_launch(size, MAX_BLOCK_SIZE)
        _quantize_kernel[(triton.cdiv(num_rows, entry.block_rows),)](
            x_TK,
            codes_TK,
            scale_T,
            activation_divisor,
            num_rows,
            x_TK.stride(0),
            size,
            BLOCK_ROWS=entry.block_rows,
            BLOCK_SIZE=entry.block_size,
            num_warps=entry.num_warps,
        )
    return codes_TK, scale_T


def pack_int8(q_NK: Tensor) -> Tensor:
    """Weights as the kernel reads them: rows filled up with zeros to a multiple of 16."""
    return torch.nn.functional.pad(q_NK, (0, -q_NK.shape[1] % ROW_ALIGNMENT)).contiguous()


def int8_matmul(
    xq_TK: Tensor, scale_T: Tensor, weight_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, y_TN: Tensor
) -> None:
    """y = (xq @ weight.T) * scale_N * scale_T + bias, into ``y_TN``, whose rows may lie apart.

    ``xq_TK`` int8, contiguous; ``weight_NK`` from ``pack_int8``; ``scale_T``, ``scale_N`` and ``bias_N`` float32.
    """
    arch = launch_table.architecture(xq_TK.device)
    entry = launch_table.entry_for(launch_table.INT8[arch], xq_TK.shape[0])
    int8_matmul_as(entry, arch, xq_TK, scale_T, weight_NK, scale_N, bias_N, y_TN)


def int8_matmul_as(
    entry: MatmulLaunch,
    arch: int,
    xq_TK: Tensor,
    scale_T: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    y_TN: Tensor,
) -> None:
    """The same by a launch of the table that is given."""
    (num_rows, num_in), num_out = xq_TK.shape, weight_NK.shape[0]
    assert xq_TK.is_contiguous() and y_TN.stride(1) == 1, "rows are contiguous"
    if num_rows == 0:
        return
    num_tiles = triton.cdiv(num_rows, entry.block_rows) * triton.cdiv(num_out, entry.block_out)
    num_steps = triton.cdiv(num_in, entry.block_in)
    num_parts = launch_table.num_splits(arch, entry.programs_per_processor, num_tiles, num_steps)
    partial_STN = partial_sums(num_parts, y_TN, torch.int32)
    _int8_matmul_kernel[(num_tiles, num_parts)](
        xq_TK,
        weight_NK,
        scale_T,
        scale_N,
        bias_N,
        y_TN,
        partial_STN,
        num_rows,
        num_out,
        num_in,
        weight_NK.stride(0),
        y_TN.stride(0),
        triton.cdiv(num_steps, num_parts),
        BLOCK_ROWS=entry.block_rows,
        BLOCK_OUT=entry.block_out,
        BLOCK_IN=entry.block_in,
        IS_EVEN=num_in % entry.block_in == 0,
        IS_SWAPPED=entry.swapped,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        enable_fp_fusion=False,
    )
    if partial_STN is not None:
        add_parts(partial_STN, y_TN, scale_T, scale_N, bias_N)
