"""Integer weights under floating-point activations, expanded inside the kernels.

Integers are multiplied as they are, exact in every dtype of activations, and sums over neighbours in one group are
scaled in float32: a weight is never rounded. How they lie in memory: ``weight_panels``.

Shapes: T rows, N out_features, K in_features, P panels, W words of a panel's row, G groups along K.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.launch_table import MatmulLaunch, RowLaunch
from quantpipe.backends.triton.ops.matmul_tiles import add_parts, partial_sums, store_tile, tile_of
from quantpipe.backends.triton.ops.weight_panels import WORDS, PackedWeights

# The float32 of these bits is 2^23; with an integer below 2^23 in its lowest bits it is 2^23 more than that integer.
# An OR and a subtraction take the place of a conversion, of which a GPU does few at a time.
EXPONENT_BITS = tl.constexpr(0x4B000000)
EXPONENT_VALUE = tl.constexpr(8388608.0)


@triton.jit
def _less(code, zero):
    """Integers less ``zero``, exact in float32."""
    return (code | EXPONENT_BITS).to(tl.float32, bitcast=True) - (zero + EXPONENT_VALUE)


@triton.jit
def _matmul_kernel(
    x_ptr,
    panels_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    num_rows,
    num_out,
    num_in,
    x_stride,
    y_stride,
    num_panels,
    panels_per_part,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WORDS: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PLACES_PER_SCALE: tl.constexpr,
    PLACES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
):
    """Multiplies PLACES times 16 columns at a time, and scales the sum over PLACES_PER_SCALE times 16."""
    BITS: tl.constexpr = 32 // VALUES
    row_tile, out_tile = tile_of(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_out, BLOCK_OUT))
    row_T = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out_N = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Rows beyond the last read the first ones again; what comes of it is not stored.
    out_in_N = out_N % num_out
    word_W = tl.arange(0, WORDS)
    x_T1 = x_ptr + (row_T % num_rows).to(tl.int64)[:, None] * x_stride
    panel_NW = panels_ptr + out_in_N[:, None] * WORDS + word_W[None, :]
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    else:
        acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    first = tl.program_id(1) * panels_per_part
    for panel in range(first, tl.minimum(first + panels_per_part, num_panels)):
        word_NW = tl.load(panel_NW + tl.cast(panel, tl.int64) * num_out * WORDS)
        for chunk in tl.static_range(VALUES // PLACES_PER_SCALE):
            start = panel * (VALUES * WORDS) + chunk * PLACES_PER_SCALE * WORDS
            zero = 8.0 if VALUES == 8 else 128.0
            if GROUP_SIZE is not None:
                # Beyond the last group there are only columns that fill the panel.
                group_N = tl.minimum(start, num_in - 1) // GROUP_SIZE * num_out + out_in_N
                if zero_ptr is not None:
                    zero = tl.load(zero_ptr + group_N).to(tl.float32)[:, None]
                part = tl.zeros_like(acc)
            else:
                if zero_ptr is not None:
                    zero = tl.load(zero_ptr + out_in_N).to(tl.float32)[:, None]
                part = acc
            for place in tl.static_range(chunk * PLACES_PER_SCALE, (chunk + 1) * PLACES_PER_SCALE, PLACES):
                column_C = panel * (VALUES * WORDS) + place * WORDS + tl.arange(0, PLACES * WORDS)
                if IS_EVEN:
                    x_TC = tl.load(x_T1 + column_C[None, :])
                else:
                    x_TC = tl.load(x_T1 + column_C[None, :], (column_C < num_in)[None, :], other=0.0)
                if PLACES == 1:
                    code_NC = (word_NW >> (BITS * place)) & ((1 << BITS) - 1)
                else:
                    shift_V = BITS * (place + tl.arange(0, PLACES))
                    code_NVW = (word_NW[:, None, :] >> shift_V[None, :, None]) & ((1 << BITS) - 1)
                    code_NC = code_NVW.reshape(BLOCK_OUT, PLACES * WORDS)
                weight_NC = _less(code_NC, zero).to(x_TC.dtype)
                if IS_SWAPPED:
                    part = tl.dot(weight_NC, tl.trans(x_TC), part, input_precision="ieee")
                else:
                    part = tl.dot(x_TC, tl.trans(weight_NC), part, input_precision="ieee")
            if GROUP_SIZE is not None:
                scale_N = tl.load(scale_ptr + group_N).to(tl.float32)
                if IS_SWAPPED:
                    acc += part * scale_N[:, None]
                else:
                    acc += part * scale_N[None, :]
            else:
                acc = part
    if IS_SWAPPED:
        acc = tl.trans(acc)
    out_scale_ptr = scale_ptr if GROUP_SIZE is None else None
    store_tile(acc, row_T, out_N, num_rows, num_out, y_ptr, y_stride, partial_ptr, None, out_scale_ptr, bias_ptr)


@triton.jit
def _one_row_kernel(
    x_ptr,
    panels_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    num_out,
    num_in,
    num_panels,
    panels_per_part,
    BLOCK_OUT: tl.constexpr,
    BLOCK_PANELS: tl.constexpr,
    WORDS: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PLACES_PER_SCALE: tl.constexpr,
):
    """The same for one row: tiles [panels, N, W], added up at the end."""
    BITS: tl.constexpr = 32 // VALUES
    out_N = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    out_in_N = out_N % num_out
    word_W = tl.arange(0, WORDS)
    sums = tl.zeros((BLOCK_PANELS, BLOCK_OUT, WORDS), tl.float32)
    first = tl.program_id(1) * panels_per_part
    end = tl.minimum(first + panels_per_part, num_panels)
    for first_panel in range(first, end, BLOCK_PANELS):
        panel_P = first_panel + tl.arange(0, BLOCK_PANELS)
        is_panel_P11 = (panel_P < end)[:, None, None]
        place_PN1 = (panel_P.to(tl.int64) * num_out)[:, None, None] + out_in_N[None, :, None]
        words = tl.load(panels_ptr + place_PN1 * WORDS + word_W[None, None, :], is_panel_P11, other=0)
        for chunk in tl.static_range(VALUES // PLACES_PER_SCALE):
            start_P = panel_P * (VALUES * WORDS) + chunk * PLACES_PER_SCALE * WORDS
            zero = 8.0 if VALUES == 8 else 128.0
            # Beyond the last group there are only columns that fill the panel.
            group_PN = out_in_N[None, :] + tl.zeros_like(start_P)[:, None]
            if GROUP_SIZE is not None:
                group_PN += (tl.minimum(start_P, num_in - 1) // GROUP_SIZE * num_out)[:, None]
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + group_PN).to(tl.float32)[:, :, None]
            part = tl.zeros_like(sums)
            for place in tl.static_range(PLACES_PER_SCALE):
                column_PW = (start_P + place * WORDS)[:, None] + word_W[None, :]
                mask_PW = (panel_P < end)[:, None] & (column_PW < num_in)
                x_PW = tl.load(x_ptr + column_PW, mask_PW, other=0.0).to(tl.float32)
                code = (words >> (BITS * (chunk * PLACES_PER_SCALE + place))) & ((1 << BITS) - 1)
                part += _less(code, zero) * x_PW[:, None, :]
            if GROUP_SIZE is not None:
                part *= tl.load(scale_ptr + group_PN).to(tl.float32)[:, :, None]
            sums += part
    sum_1N = tl.sum(tl.sum(sums, axis=2), axis=0)[None, :]
    out_scale_ptr = scale_ptr if GROUP_SIZE is None else None
    store_tile(sum_1N, tl.arange(0, 1), out_N, 1, num_out, y_ptr, 0, partial_ptr, None, out_scale_ptr, bias_ptr)


def _places_per_scale(weights: PackedWeights) -> int:
    """How many times 16 columns of a panel share their scales, wherever the panel begins."""
    if weights.group_size is None:
        return weights.values_per_word
    return math.gcd(weights.group_size // WORDS, weights.values_per_word)


def weight_only_matmul(x_TK: Tensor, weights: PackedWeights, bias_N: Tensor | None, y_TN: Tensor) -> None:
    """y = x @ weight.T + bias, into ``y_TN``; rows of both may lie apart.

    x is float32, float16 or bfloat16, y of any of them; ``bias_N`` float32.
    """
    arch = launch_table.architecture(x_TK.device)
    if x_TK.shape[0] == 1:
        one_row_matmul_as(launch_table.ONE_ROW[arch], arch, x_TK, weights, bias_N, y_TN)
    elif x_TK.shape[0] > 1:
        entry = launch_table.entry_for(launch_table.WEIGHT_ONLY[arch], x_TK.shape[0])
        matmul_as(entry, arch, x_TK, weights, bias_N, y_TN)


def matmul_as(
    entry: MatmulLaunch, arch: int, x_TK: Tensor, weights: PackedWeights, bias_N: Tensor | None, y_TN: Tensor
) -> None:
    """The same by a launch of the table that is given."""
    assert x_TK.stride(1) == 1 and y_TN.stride(1) == 1, "rows are contiguous"
    (num_rows, num_in), num_out = x_TK.shape, weights.out_features
    num_tiles = triton.cdiv(num_rows, entry.block_rows) * triton.cdiv(num_out, entry.block_out)
    num_panels = weights.panels_PNW.shape[0]
    num_parts = launch_table.num_splits(arch, entry.programs_per_processor, num_tiles, num_panels)
    partial_STN = partial_sums(num_parts, y_TN, torch.float32)
    _matmul_kernel[(num_tiles, num_parts)](
        x_TK,
        weights.panels_PNW,
        weights.scale_GN,
        weights.zero_GN,
        bias_N,
        y_TN,
        partial_STN,
        num_rows,
        num_out,
        num_in,
        x_TK.stride(0),
        y_TN.stride(0),
        num_panels,
        triton.cdiv(num_panels, num_parts),
        BLOCK_ROWS=entry.block_rows,
        BLOCK_OUT=entry.block_out,
        WORDS=WORDS,
        VALUES=weights.values_per_word,
        GROUP_SIZE=weights.group_size,
        PLACES_PER_SCALE=_places_per_scale(weights),
        PLACES=min(_places_per_scale(weights), entry.block_in // WORDS),
        IS_EVEN=num_in % weights.panel_size == 0,
        IS_SWAPPED=entry.swapped,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
    )
    if partial_STN is not None:
        add_parts(partial_STN, y_TN, None, weights.scale_GN if weights.group_size is None else None, bias_N)


def one_row_matmul_as(
    entry: RowLaunch, arch: int, x_1K: Tensor, weights: PackedWeights, bias_N: Tensor | None, y_1N: Tensor
) -> None:
    """The same for one row, without tensor cores."""
    assert x_1K.shape[0] == 1 and x_1K.stride(1) == 1 and y_1N.stride(1) == 1, "one contiguous row"
    num_panels, num_out, _ = weights.panels_PNW.shape
    num_tiles = triton.cdiv(num_out, entry.block_out)
    num_steps = triton.cdiv(num_panels, entry.block_panels)
    num_parts = launch_table.num_splits(arch, entry.programs_per_processor, num_tiles, num_steps)
    partial_STN = partial_sums(num_parts, y_1N, torch.float32)
    _one_row_kernel[(num_tiles, num_parts)](
        x_1K,
        weights.panels_PNW,
        weights.scale_GN,
        weights.zero_GN,
        bias_N,
        y_1N,
        partial_STN,
        num_out,
        x_1K.shape[1],
        num_panels,
        triton.cdiv(num_steps, num_parts) * entry.block_panels,
        BLOCK_OUT=entry.block_out,
        BLOCK_PANELS=entry.block_panels,
        WORDS=WORDS,
        VALUES=weights.values_per_word,
        GROUP_SIZE=weights.group_size,
        PLACES_PER_SCALE=_places_per_scale(weights),
        num_warps=entry.num_warps,
    )
    if partial_STN is not None:
        add_parts(partial_STN, y_1N, None, weights.scale_GN if weights.group_size is None else None, bias_N)
