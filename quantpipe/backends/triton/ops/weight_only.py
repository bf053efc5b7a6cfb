"""Integer weights under floating-point activations, expanded inside the kernels.

Integers are multiplied as they are, exact in every dtype of activations, and the sum over a panel of K is scaled in
float32: a weight is never rounded. How they lie in memory: ``weight_panels``.

Shapes: T rows, N out_features, K in_features, G groups along K; in tiles C columns of a panel, W words or bytes of its
row, V values of a word.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.launch_table import MatmulLaunch, RowLaunch
from quantpipe.backends.triton.ops.matmul_tiles import add_parts, partial_sums, store_tile, tile_of
from quantpipe.backends.triton.ops.weight_panels import PackedWeights

# The float32 of these bits is 2^23; with an integer below 2^23 in its lowest bits it is 2^23 more than that integer.
# An OR and a subtraction take the place of a conversion, of which a GPU does few at a time.
EXPONENT_BITS = tl.constexpr(0x4B000000)
EXPONENT_VALUE = tl.constexpr(8388608.0)


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
    panels_per_group,
    panels_per_part,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    PANEL: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_SWAPPED: tl.constexpr,
):
    WIDTH: tl.constexpr = PANEL // 8 if HAS_WORDS else PANEL
    MIDDLE: tl.constexpr = 8.0 if HAS_WORDS else 128.0
    row_tile, out_tile = tile_of(tl.program_id(0), tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(num_out, BLOCK_OUT))
    row_T = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out_N = out_tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    # Rows beyond the last read the first ones again; what comes of it is not stored.
    out_in_N = out_N % num_out
    x_T1 = x_ptr + (row_T % num_rows).to(tl.int64)[:, None] * x_stride
    panel_NW = panels_ptr + out_in_N[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if IS_SWAPPED:
        acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    else:
        acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    first = tl.program_id(1) * panels_per_part
    for panel in range(first, tl.minimum(first + panels_per_part, num_panels)):
        column_C = panel * PANEL + tl.arange(0, PANEL)
        if IS_EVEN:
            x_TC = tl.load(x_T1 + column_C[None, :])
        else:
            x_TC = tl.load(x_T1 + column_C[None, :], (column_C < num_in)[None, :], other=0.0)
        code_NC = tl.load(panel_NW + tl.cast(panel, tl.int64) * num_out * WIDTH).to(tl.int32)
        if HAS_WORDS:
            code_NWV = (code_NC[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
            code_NC = code_NWV.reshape(BLOCK_OUT, PANEL)
        shifted_NC = (code_NC | EXPONENT_BITS).to(tl.float32, bitcast=True)
        group = panel // panels_per_group
        if zero_ptr is not None:
            zero_N = tl.load(zero_ptr + group * num_out + out_in_N).to(tl.float32)
            weight_NC = (shifted_NC - (zero_N + EXPONENT_VALUE)[:, None]).to(x_TC.dtype)
        else:
            weight_NC = (shifted_NC - (EXPONENT_VALUE + MIDDLE)).to(x_TC.dtype)
        if HAS_GROUPS:
            scale_N = tl.load(scale_ptr + group * num_out + out_in_N).to(tl.float32)
            if IS_SWAPPED:
                acc += tl.dot(weight_NC, tl.trans(x_TC), input_precision="ieee") * scale_N[:, None]
            else:
                acc += tl.dot(x_TC, tl.trans(weight_NC), input_precision="ieee") * scale_N[None, :]
        elif IS_SWAPPED:
            acc = tl.dot(weight_NC, tl.trans(x_TC), acc, input_precision="ieee")
        else:
            acc = tl.dot(x_TC, tl.trans(weight_NC), acc, input_precision="ieee")
    if IS_SWAPPED:
        acc = tl.trans(acc)
    out_scale_ptr = None if HAS_GROUPS else scale_ptr
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
    panels_per_group,
    panels_per_part,
    BLOCK_OUT: tl.constexpr,
    BLOCK_PANELS: tl.constexpr,
    PANEL: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
):
    """Tiles [panels, N, W, V]: V values of a word are added up in one thread."""
    VALUES: tl.constexpr = 8 if HAS_WORDS else 1
    WIDTH: tl.constexpr = PANEL // VALUES
    MIDDLE: tl.constexpr = 8.0 if HAS_WORDS else 128.0
    out_N = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    out_in_N = out_N % num_out
    word_W, value_V = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    column_WV = word_W[:, None] * VALUES + value_V[None, :]
    sums = tl.zeros((BLOCK_PANELS, BLOCK_OUT, WIDTH), tl.float32)
    first = tl.program_id(1) * panels_per_part
    end = tl.minimum(first + panels_per_part, num_panels)
    for start in range(first, end, BLOCK_PANELS):
        panel_P = start + tl.arange(0, BLOCK_PANELS)
        is_panel_P = panel_P < end
        place = panel_P.to(tl.int64)[:, None, None] * num_out * WIDTH + out_in_N[None, :, None] * WIDTH
        word = tl.load(panels_ptr + place + word_W[None, None, :], is_panel_P[:, None, None], other=0).to(tl.int32)
        if HAS_WORDS:
            code = (word[:, :, :, None] >> (4 * value_V)[None, None, None, :]) & 15
        else:
            code = word[:, :, :, None]
        shifted = (code | EXPONENT_BITS).to(tl.float32, bitcast=True)
        column = panel_P[:, None, None, None] * PANEL + column_WV[None, None, :, :]
        # Columns beyond the last are zero, so what stands for a weight there does not matter.
        x = tl.load(x_ptr + column, is_panel_P[:, None, None, None] & (column < num_in), other=0.0).to(tl.float32)
        group_P1 = (panel_P // panels_per_group)[:, None] * num_out
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + group_P1 + out_in_N[None, :], is_panel_P[:, None], other=0).to(tl.float32)
            weight = shifted - (zero + EXPONENT_VALUE)[:, :, None, None]
        else:
            weight = shifted - (EXPONENT_VALUE + MIDDLE)
        part = tl.sum(weight * x, axis=3)
        if HAS_GROUPS:
            scale = tl.load(scale_ptr + group_P1 + out_in_N[None, :], is_panel_P[:, None], other=0.0).to(tl.float32)
            part = part * scale[:, :, None]
        sums += part
    sum_1N = tl.sum(tl.sum(sums, axis=2), axis=0)[None, :]
    out_scale_ptr = None if HAS_GROUPS else scale_ptr
    store_tile(sum_1N, tl.arange(0, 1), out_N, 1, num_out, y_ptr, 0, partial_ptr, None, out_scale_ptr, bias_ptr)


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
        weights.panels_per_group,
        triton.cdiv(num_panels, num_parts),
        BLOCK_ROWS=entry.block_rows,
        BLOCK_OUT=entry.block_out,
        PANEL=weights.panel_size,
        HAS_WORDS=weights.has_words,
        HAS_GROUPS=weights.has_groups,
        IS_EVEN=num_in % weights.panel_size == 0,
        IS_SWAPPED=entry.swapped,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
    )
    if partial_STN is not None:
        add_parts(partial_STN, y_TN, None, None if weights.has_groups else weights.scale_GN, bias_N)


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
        weights.panels_per_group,
        triton.cdiv(num_steps, num_parts) * entry.block_panels,
        BLOCK_OUT=entry.block_out,
        BLOCK_PANELS=entry.block_panels,
        PANEL=weights.panel_size,
        HAS_WORDS=weights.has_words,
        HAS_GROUPS=weights.has_groups,
        num_warps=entry.num_warps,
    )
    if partial_STN is not None:
        add_parts(partial_STN, y_1N, None, None if weights.has_groups else weights.scale_GN, bias_N)
