"""4-bit weights under 16-bit activations: torch's int4 kernel for few rows, expanded weights for many.

Both round activations and results to bfloat16 (the only activations that kernel is fast for) and add up in float32,
so that what is scored in long prompts and what is decoded one token at a time follow one rule.

Shapes: T rows, N out_features, K in_features, G groups along K, g group_size, P K / 2.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from quantpipe.backends.cpu.kernel_check import CpuLinear, KernelCase, find_fault
from quantpipe.backends.cpu.matmul import matmul
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import GROUP_SIZES, w4a16
from quantpipe.models.weights import LinearWeights, num_bytes

# The kernel works on tiles of this many output channels.
KERNEL_TILE = 16
# Beyond this many rows, expanding the weights first is faster.
MAX_KERNEL_ROWS = 32
MAX_KERNEL_ROWS_FAST_BFLOAT16 = 16


@functools.cache
def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; without it a bfloat16 matmul is slower than a float32 one."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


class Int4KernelLinear:
    """Few rows through ``_weight_int4pack_mm_for_cpu``. Holds the weights in that kernel's private layout."""

    def __init__(self, weights: LinearWeights) -> None:
        assert weights.scale_NG is not None, "only quantized weights have a packed form"
        self._group_size = weights.weight_NK.shape[1] // weights.scale_NG.shape[1]
        unsigned_NK = weights.weight_NK.to(torch.int32) + 8
        self._packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned_NK, 1)
        # The kernel computes (q - 8) * scale + zero over unsigned q; symmetric weights need no zero.
        scale_GN = weights.scale_NG.to(torch.bfloat16).T
        self._scale_and_zero_GN2 = torch.stack((scale_GN, torch.zeros_like(scale_GN)), dim=-1).contiguous()
        self.weight_bytes = num_bytes([self._packed, self._scale_and_zero_GN2])

    def __call__(self, x_TK: Tensor) -> Tensor:
        y_TN: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TK.to(torch.bfloat16), self._packed, self._group_size, self._scale_and_zero_GN2
        )
        return y_TN.float()


class Int4ExpandedLinear:
    """Any number of rows: expands the weights to float32 in the scratch buffer, then an ordinary matmul.

    Holds two weights per byte: column p in the low and column p + K / 2 in the high half, so that both halves of a
    row are written in one run.
    """

    def __init__(self, weights: LinearWeights, scratch: Scratch, compute_dtype: torch.dtype, rounds: bool) -> None:
        assert weights.scale_NG is not None, "only quantized weights can be expanded"
        low_NP, high_NP = weights.weight_NK.chunk(2, dim=1)
        self._pairs_NP = (high_NP << 4) | (low_NP & 15)
        self._scale_NG1 = weights.scale_NG.float().unsqueeze(-1)
        self._scratch, self._compute_dtype, self._rounds = scratch, compute_dtype, rounds
        self.weight_bytes = num_bytes([self._pairs_NP, self._scale_NG1])

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._compute_dtype is torch.bfloat16:
            return torch.nn.functional.linear(x_TK.to(torch.bfloat16), self._expanded().to(torch.bfloat16)).float()
        if not self._rounds:
            return matmul(x_TK, self._expanded())
        y_TN = matmul(x_TK.to(torch.bfloat16).float(), self._expanded())
        return y_TN.to(torch.bfloat16).float()

    def _expanded(self) -> Tensor:
        num_out, half = self._pairs_NP.shape
        weight_NK = self._scratch.matrix(num_out, 2 * half)
        weight_NK[:, :half] = (self._pairs_NP << 4) >> 4  # arithmetic shifts of int8 keep the sign
        weight_NK[:, half:] = self._pairs_NP >> 4
        weight_NK.view(num_out, self._scale_NG1.shape[1], -1).mul_(self._scale_NG1)
        return weight_NK


class Int4Linear:
    """Chooses by the number of rows."""

    def __init__(self, weights: LinearWeights, scratch: Scratch, fast_bfloat16: bool) -> None:
        self._few_rows = Int4KernelLinear(weights)
        compute_dtype = torch.bfloat16 if fast_bfloat16 else torch.float32
        self._many_rows = Int4ExpandedLinear(weights, scratch, compute_dtype, rounds=True)
        self._max_kernel_rows = MAX_KERNEL_ROWS_FAST_BFLOAT16 if fast_bfloat16 else MAX_KERNEL_ROWS
        self.weight_bytes = self._few_rows.weight_bytes + self._many_rows.weight_bytes

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._few_rows(x_TK) if x_TK.shape[0] <= self._max_kernel_rows else self._many_rows(x_TK)


def why_not_kernel(weights: LinearWeights) -> str | None:
    """Why these weights cannot go through the int4 kernel, or None where they can."""
    fault = kernel_fault()
    if fault is not None:
        return fault
    if weights.weight_NK.shape[0] % KERNEL_TILE:
        return f"{weights.weight_NK.shape[0]} output features are not a multiple of {KERNEL_TILE}"
    scale = weights.scale_NG
    if scale is not None and not torch.equal(scale.float(), scale.to(torch.bfloat16).float()):
        return f"scales stored as {str(scale.dtype).removeprefix('torch.')} do not fit bfloat16"
    return None


@functools.cache
def kernel_fault() -> str | None:
    """The verdict on torch's int4 kernel on this machine; tried once per process."""
    return find_fault(Int4KernelLinear, kernel_cases())


def kernel_cases() -> Iterator[KernelCase]:
    """Every group size and a few row counts, over the full range of weights."""
    generator = torch.Generator().manual_seed(0)
    for group_size in GROUP_SIZES:
        num_out, num_in = 3 * KERNEL_TILE, 2 * group_size
        q_NK = torch.randint(-8, 8, (num_out, num_in), generator=generator, dtype=torch.int8)
        scale_NG = (torch.rand(num_out, 2, generator=generator) + 0.1).to(torch.bfloat16)
        weights = LinearWeights(q_NK, scale_NG, None, w4a16(group_size))
        for num_rows in (1, 4, 17):
            x_TK = torch.randn(num_rows, num_in, generator=generator).to(torch.bfloat16).float()
            weight_NK = decode(q_NK, scale_NG).double()
            expected_TN = x_TK.double() @ weight_NK.T
            # bfloat16 carries 8 bits: results are rounded once, and kernels may round each weight once.
            tolerance_TN = 2**-8 * expected_TN.abs() + 2**-9 * (x_TK.double().abs() @ weight_NK.abs().T)
            name = f"int4 kernel, groups of {group_size}, {num_rows} rows"
            yield KernelCase(name, weights, x_TK, expected_TN, tolerance_TN)


def make_int4_linear(weights: LinearWeights, scratch: Scratch) -> tuple[CpuLinear, str]:
    """The fastest right way to run 4-bit weights on this machine, and what the user should know about it."""
    reason = why_not_kernel(weights)
    if reason is not None:
        linear = Int4ExpandedLinear(weights, scratch, torch.float32, rounds=False)
        return linear, f"w4a16: torch's int4 kernel is not used ({reason}); weights are expanded to float32, slower"
    many = "bfloat16" if has_fast_bfloat16() else "float32 (no bfloat16 instructions here)"
    rows = MAX_KERNEL_ROWS_FAST_BFLOAT16 if has_fast_bfloat16() else MAX_KERNEL_ROWS
    note = f"w4a16: bfloat16 activations; torch's int4 kernel up to {rows} rows, expanded weights in {many} beyond"
    return Int4Linear(weights, scratch, has_fast_bfloat16()), note
