"""What gates an MLP: activation(gate) * up, in float32, as it is or as 8-bit codes.

Shapes: T rows, I intermediate_size, R rows of one program, C columns that it holds at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.ops.rounding import larger, largest_magnitude, row_scale, to_codes
from quantpipe.models.description import Activation

MAX_BLOCK_SIZE = 4096
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def _gate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        turn = gate
    else:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u.
        turn = TWO_SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-turn)) * up


@triton.jit
def _load_gated(gate_up_ptr, row_R, column_C, num_rows, size, ACTIVATION: tl.constexpr):
    """Of rows [gate | up] these columns, gated [R, C]; zero outside."""
    mask_RC = (row_R < num_rows)[:, None] & (column_C < size)[None, :]
    gate_RC = gate_up_ptr + row_R.to(tl.int64)[:, None] * (2 * size) + column_C[None, :]
    gate = tl.load(gate_RC, mask_RC, other=0.0).to(tl.float32)
    up = tl.load(gate_RC + size, mask_RC, other=0.0).to(tl.float32)
    return _gate(gate, up, ACTIVATION), mask_RC


@triton.jit
def _gated_kernel(
    gate_up_ptr,
    out_ptr,
    num_rows,
    size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    row_R = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column_C = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x_RC, mask_RC = _load_gated(gate_up_ptr, row_R, column_C, num_rows, size, ACTIVATION)
    dense_RC = row_R.to(tl.int64)[:, None] * size + column_C[None, :]
    tl.store(out_ptr + dense_RC, x_RC.to(out_ptr.dtype.element_ty), mask_RC)


@triton.jit
def _gated_quantized_kernel(
    gate_up_ptr,
    codes_ptr,
    scale_ptr,
    divisor,
    num_rows,
    size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Gates twice, once to find the scale: a row need not fit in a program. The second reading is from the cache."""
    row_R = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    largest_R = tl.zeros((BLOCK_ROWS,), tl.float32)
    for start in range(0, size, BLOCK_SIZE):
        x_RC, _ = _load_gated(gate_up_ptr, row_R, start + tl.arange(0, BLOCK_SIZE), num_rows, size, ACTIVATION)
        largest_R = larger(largest_R, largest_magnitude(x_RC))
    scale_R = row_scale(largest_R, divisor)
    tl.store(scale_ptr + row_R, scale_R, row_R < num_rows)
    for start in range(0, size, BLOCK_SIZE):
        column_C = start + tl.arange(0, BLOCK_SIZE)
        x_RC, mask_RC = _load_gated(gate_up_ptr, row_R, column_C, num_rows, size, ACTIVATION)
        dense_RC = row_R.to(tl.int64)[:, None] * size + column_C[None, :]
        tl.store(codes_ptr + dense_RC, to_codes(x_RC, scale_R), mask_RC)


def gated(gate_up_T2I: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up [T, I] in the dtype of ``gate_up_T2I``, whose rows are [gate | up], contiguous."""
    num_rows, size = _shape(gate_up_T2I)
    out_TI = torch.empty(num_rows, size, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if num_rows:
        entry = launch_table.rows_launch(size, MAX_BLOCK_SIZE)
        grid = (triton.cdiv(num_rows, entry.block_rows), triton.cdiv(size, entry.block_size))
        _gated_kernel[grid](
            gate_up_T2I,
            out_TI,
            num_rows,
            size,
            BLOCK_ROWS=entry.block_rows,
            BLOCK_SIZE=entry.block_size,
            ACTIVATION=activation,
            num_warps=entry.num_warps,
        )
    return out_TI


def gated_quantized(gate_up_T2I: Tensor, activation: Activation, activation_divisor: float) -> tuple[Tensor, Tensor]:
    """The same, not rounded to that dtype, as int8 codes [T, I] and a float32 scale of each row [T]."""
    num_rows, size = _shape(gate_up_T2I)
    codes_TI = torch.empty(num_rows, size, dtype=torch.int8, device=gate_up_T2I.device)
    scale_T = torch.empty(num_rows, dtype=torch.float32, device=gate_up_T2I.device)
    if num_rows:
        entry = launch_table.rows_launch(size, MAX_BLOCK_SIZE)
        _gated_quantized_kernel[(triton.cdiv(num_rows, entry.block_rows),)](
            gate_up_T2I,
            codes_TI,
            scale_T,
            activation_divisor,
            num_rows,
            size,
            BLOCK_ROWS=entry.block_rows,
            BLOCK_SIZE=entry.block_size,
            ACTIVATION=activation,
            num_warps=entry.num_warps,
        )
    return codes_TI, scale_T


def _shape(gate_up_T2I: Tensor) -> tuple[int, int]:
    assert gate_up_T2I.is_contiguous(), "gates and what they gate lie side by side"
    return gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
