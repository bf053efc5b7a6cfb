"""RMS norm, with the residual added before it and 8-bit quantization behind it where they are wanted.

All arithmetic is in float32. A norm that quantizes does so before anything is rounded to the dtype of the model.

Shapes: T rows (of heads: T tokens x heads), H what is normed over.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.ops.rounding import largest_magnitude, row_scale, to_codes
from quantpipe.errors import RecipeError

MAX_SIZE = 16384


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,
    out_ptr,
    scale_ptr,
    eps,
    divisor,
    num_rows,
    rows_per_token,
    token_stride,
    row_stride,
    size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZES: tl.constexpr,
):
    """Row r of x is at (r // rows_per_token) * token_stride + (r % rows_per_token) * row_stride; the rest is dense."""
    row_R = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column_H = tl.arange(0, BLOCK_SIZE)
    mask_RH = (row_R < num_rows)[:, None] & (column_H < size)[None, :]
    start_R = (row_R // rows_per_token).to(tl.int64) * token_stride + (row_R % rows_per_token) * row_stride
    dense_RH = row_R.to(tl.int64)[:, None] * size + column_H[None, :]

    x_RH = tl.load(x_ptr + start_R[:, None] + column_H[None, :], mask_RH, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        sum_RH = x_RH + tl.load(residual_ptr + dense_RH, mask_RH, other=0.0).to(tl.float32)
        stored_RH = sum_RH.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + dense_RH, stored_RH, mask_RH)
        x_RH = stored_RH.to(tl.float32)
    weight_H = tl.load(weight_ptr + column_H, column_H < size, other=0.0).to(tl.float32)
    mean_R = tl.div_rn(tl.sum(x_RH * x_RH, axis=1), size.to(tl.float32))
    y_RH = x_RH * tl.rsqrt(mean_R + eps)[:, None] * weight_H[None, :]
    if QUANTIZES:
        scale_R = row_scale(largest_magnitude(y_RH), divisor)
        tl.store(out_ptr + dense_RH, to_codes(y_RH, scale_R), mask_RH)
        tl.store(scale_ptr + row_R, scale_R, row_R < num_rows)
    else:
        tl.store(out_ptr + dense_RH, y_RH.to(out_ptr.dtype.element_ty), mask_RH)


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype, contiguous.

    ``x`` is [T, H], or [tokens, heads, H] where each head is normed; its last dimension is contiguous. With a residual
    [T, H], contiguous, that becomes x + residual in place, and what is normed is that sum as it was stored.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight_H, eps, residual_TH, out, None, 1.0)
    return out


def rms_norm_quantized(
    x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None, activation_divisor: float
) -> tuple[Tensor, Tensor]:
    """The same as int8 codes [T, H] and a float32 scale of each row [T], by ``formats.layout.quantize_activations``."""
    codes_TH = torch.empty(x_TH.shape, dtype=torch.int8, device=x_TH.device)
    scale_T = torch.empty(x_TH.shape[0], dtype=torch.float32, device=x_TH.device)
    _launch(x_TH, weight_H, eps, residual_TH, codes_TH, scale_T, activation_divisor)
    return codes_TH, scale_T


def check_size(size: int) -> None:
    """Raise RecipeError where one program cannot hold a row."""
    if size > MAX_SIZE:
        raise RecipeError(
            f"engine.backend: 'triton' takes norms over up to {MAX_SIZE} features, and the model has one over {size}; "
            "choose another backend, such as 'cpu'"
        )


def _launch(
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    residual_TH: Tensor | None,
    out: Tensor,
    scale_T: Tensor | None,
    divisor: float,
) -> None:
    size = x.shape[-1]
    check_size(size)
    assert x.stride(-1) == 1 and weight_H.is_contiguous(), "norms read contiguous features"
    assert residual_TH is None or (residual_TH.is_contiguous() and residual_TH.shape == x.shape), "residual is not x's"
    rows_per_token = 1 if x.ndim == 2 else x.shape[1]
    num_rows = x.shape[0] * rows_per_token
    if num_rows == 0:
        return
    entry = launch_table.rows_launch(size, MAX_SIZE)
    _rms_norm_kernel[(triton.cdiv(num_rows, entry.block_rows),)](
        x,
        weight_H,
        residual_TH,
        out,
        scale_T,
        eps,
        divisor,
        num_rows,
        rows_per_token,
        x.stride(0),
        0 if x.ndim == 2 else x.stride(1),
        size,
        BLOCK_ROWS=entry.block_rows,
        BLOCK_SIZE=entry.block_size,
        HAS_RESIDUAL=residual_TH is not None,
        QUANTIZES=scale_T is not None,
        num_warps=entry.num_warps,
    )
