"""4-bit weights under 16-bit activations: torch's int4 kernel for few rows, expanded weights for many.

Both round activations and results to bfloat16 (the only activations that kernel is fast for) and add up in float32,
so that what is scored in long prompts and what is decoded one token at a time follow one rule.

Shapes: T rows, N out_features, K in_features, G groups along K.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from quantpipe.backends.cpu.expanded import ExpandedLinear
from quantpipe.backends.cpu.kernel_check import CpuLinear, KernelCase, find_fault
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.formats.scheme import GROUP_SIZES, weight_only
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
        self._group_size = kernel_group_size(weights)
        num_repeats = weights.weight_NK.shape[1] // self._group_size // weights.scale_NG.shape[1]
        unsigned_NK = weights.weight_NK.to(torch.int32) + 8
        self._packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned_NK, 1)
        # The kernel computes (q - 8) * scale + zero over unsigned q; symmetric weights need no zero.
        scale_NG = weights.scale_NG.float().repeat_interleave(num_repeats, dim=1)
        zero_NG = torch.zeros_like(scale_NG)
        if weights.zero_NG is not None:
            zero_NG = -scale_NG * weights.zero_NG.float().repeat_interleave(num_repeats, dim=1)
        stored_zero_NG = zero_NG.to(torch.bfloat16)
        self._scale_and_zero_GN2 = torch.stack((scale_NG.to(torch.bfloat16), stored_zero_NG), dim=-1)
        self._scale_and_zero_GN2 = self._scale_and_zero_GN2.transpose(0, 1).contiguous()
        # What bfloat16 loses of scale * zero is the same for a whole group, so it is put back by the group's sum of x.
        self._lost_NG = None if weights.zero_NG is None else zero_NG - stored_zero_NG.float()
        held = [self._packed, self._scale_and_zero_GN2, *([] if self._lost_NG is None else [self._lost_NG])]
        self.weight_bytes = num_bytes(held)

    def __call__(self, x_TK: Tensor) -> Tensor:
        x_TK = x_TK.to(torch.bfloat16)
        y_TN: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x_TK, self._packed, self._group_size, self._scale_and_zero_GN2
        ).float()
        if self._lost_NG is None:
            return y_TN
        x_TG = x_TK.float().view(x_TK.shape[0], -1, self._group_size).sum(-1)
        return y_TN.addmm_(x_TG, self._lost_NG.T)


class Int4Linear:
    """Chooses by the number of rows."""

    def __init__(self, weights: LinearWeights, scratch: Scratch, fast_bfloat16: bool) -> None:
        self._few_rows = Int4KernelLinear(weights)
        compute_dtype = torch.bfloat16 if fast_bfloat16 else torch.float32
        self._many_rows = ExpandedLinear(weights, scratch, compute_dtype, rounds=True)
        self._max_kernel_rows = MAX_KERNEL_ROWS_FAST_BFLOAT16 if fast_bfloat16 else MAX_KERNEL_ROWS
        self.weight_bytes = self._few_rows.weight_bytes + self._many_rows.weight_bytes

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._few_rows(x_TK) if x_TK.shape[0] <= self._max_kernel_rows else self._many_rows(x_TK)


def why_not_kernel(weights: LinearWeights) -> str | None:
    """Why these weights cannot go through the int4 kernel, or None where they can."""
    fault = kernel_fault()
    if fault is not None:
        return fault
    if not kernel_group_size(weights):
        return f"{weights.weight_NK.shape[1]} input features cannot be cut into its groups of {GROUP_SIZES}"
    if weights.weight_NK.shape[0] % KERNEL_TILE:
        return f"{weights.weight_NK.shape[0]} output features are not a multiple of {KERNEL_TILE}"
    scale = weights.scale_NG
    if scale is not None and not torch.equal(scale.float(), scale.to(torch.bfloat16).float()):
        return f"scales stored as {str(scale.dtype).removeprefix('torch.')} do not fit bfloat16"
    return None


def kernel_group_size(weights: LinearWeights) -> int:
    """The kernel has no scales per channel: those are repeated for groups of the largest size that fits, 0 if none."""
    assert weights.scheme is not None, "only quantized weights have groups"
    num_in, group_size = weights.weight_NK.shape[1], weights.scheme.group_size
    fitting = [size for size in GROUP_SIZES if num_in % size == 0 and group_size in (size, None)]
    return max(fitting, default=0)


@functools.cache
def kernel_fault() -> str | None:
    """The verdict on torch's int4 kernel on this machine; tried once per process."""
    return find_fault(Int4KernelLinear, kernel_cases())


def kernel_cases() -> Iterator[KernelCase]:
    """Every group size and a few row counts, over the full range of weights, scales of either sign, and zero points."""
    generator = torch.Generator().manual_seed(0)
    for group_size, symmetric in itertools.product(GROUP_SIZES, (True, False)):
        num_out, num_in = 3 * KERNEL_TILE, 2 * group_size
        q_NK, zero_NG = (
            torch.randint(-8, 8, (num_out, width), generator=generator, dtype=torch.int8) for width in (num_in, 2)
        )
        sign_NG = torch.randint(2, (num_out, 2), generator=generator) * 2 - 1
        scale_NG = ((torch.rand(num_out, 2, generator=generator) + 0.1) * sign_NG).to(torch.bfloat16)
        scheme = weight_only(4, group_size, symmetric)
        weights = LinearWeights(q_NK, scale_NG, None, scheme, None if symmetric else zero_NG)
        for num_rows in (1, 4, 17):
            x_TK = torch.randn(num_rows, num_in, generator=generator).to(torch.bfloat16).float()
            weight_NK = weights.dequantized().double()
            expected_TN = x_TK.double() @ weight_NK.T
            # bfloat16 carries 8 bits: results are rounded once, and kernels may round each weight once.
            tolerance_TN = 2**-8 * expected_TN.abs() + 2**-9 * (x_TK.double().abs() @ weight_NK.abs().T)
            name = f"int4 kernel, {scheme.label}, {num_rows} rows"
            yield KernelCase(name, weights, x_TK, expected_TN, tolerance_TN)


def make_int4_linear(weights: LinearWeights, scratch: Scratch) -> tuple[CpuLinear, str]:
    """The fastest right way to run 4-bit weights on this machine, and what the user should know about it."""
    reason = why_not_kernel(weights)
    if reason is not None:
        linear = ExpandedLinear(weights, scratch, torch.float32, rounds=False)
        return linear, f"w4a16: torch's int4 kernel is not used ({reason}); weights are expanded to float32, slower"
    many = "bfloat16" if has_fast_bfloat16() else "float32 (no bfloat16 instructions here)"
    rows = MAX_KERNEL_ROWS_FAST_BFLOAT16 if has_fast_bfloat16() else MAX_KERNEL_ROWS
    note = f"w4a16: bfloat16 activations; torch's int4 kernel up to {rows} rows, expanded weights in {many} beyond"
    return Int4Linear(weights, scratch, has_fast_bfloat16()), note
