"""Kernels that work row by row: norms, gates, what they quantize, and the search for the most likely token.

Shapes: T rows, H what is normed over, I intermediate_size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quantpipe.backends.triton.ops.activation import gated, gated_quantized
from quantpipe.backends.triton.ops.norm import rms_norm, rms_norm_quantized
from quantpipe.backends.triton.ops.sampling import most_likely
from quantpipe.doctor.cases.case import ROUNDING, Case, code_error, error, generator, inequality
from quantpipe.models.description import Activation

DIVISOR, EPS = 127.0, 1e-5
NUM_ROWS = 5
# Not a power of two, and as wide as models are.
SIZES = (96, 5120)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
# A value near the middle between two codes may go to either, by float32 in another order.
CODE_SLACK = 2e-6
VOCAB = 20_000


def row_cases(dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Each with and without what may be joined to it."""
    for dtype in dtypes:
        for size in SIZES:
            for has_residual in (False, True):
                what = f"H={size}{' + residual' if has_residual else ''}"
                yield Case("norm", dtype, what, partial(_norm, size, has_residual, dtype))
                yield Case("norm to int8", dtype, what, partial(_norm_quantized, size, has_residual, dtype))
            for activation in ACTIVATIONS:
                yield Case("gate", dtype, f"{activation} I={size}", partial(_gate, activation, size, dtype))
                quantized = partial(_gate_quantized, activation, size, dtype)
                yield Case("gate to int8", dtype, f"{activation} I={size}", quantized)
        yield Case("most likely", dtype, f"V={VOCAB}", partial(_most_likely, dtype))


def _norm_inputs(
    size: int, has_residual: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """x, weight, residual; and what the residual becomes, and its norm in float64."""
    draws = generator()
    x_TH, weight_H = torch.randn(NUM_ROWS, size, generator=draws).to(dtype), torch.rand(size, generator=draws) + 0.5
    residual_TH = torch.randn(NUM_ROWS, size, generator=draws).to(dtype) if has_residual else None
    sum_TH = x_TH if residual_TH is None else (x_TH.float() + residual_TH.float()).to(dtype)
    wide_TH = sum_TH.double()
    normed_TH = wide_TH / (wide_TH.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_H.double()
    return x_TH, weight_H, residual_TH, sum_TH, normed_TH


def _norm(size: int, has_residual: bool, dtype: torch.dtype, device: torch.device) -> float:
    x_TH, weight_H, residual_TH, sum_TH, normed_TH = _norm_inputs(size, has_residual, dtype)
    residual_TH = None if residual_TH is None else residual_TH.to(device)
    found_TH = rms_norm(x_TH.to(device), weight_H.to(device), EPS, residual_TH)
    own = error(found_TH, normed_TH, ROUNDING[dtype])
    return own if residual_TH is None else max(own, inequality(residual_TH, sum_TH))


def _norm_quantized(size: int, has_residual: bool, dtype: torch.dtype, device: torch.device) -> float:
    x_TH, weight_H, residual_TH, sum_TH, normed_TH = _norm_inputs(size, has_residual, dtype)
    residual_TH = None if residual_TH is None else residual_TH.to(device)
    codes = rms_norm_quantized(x_TH.to(device), weight_H.to(device), EPS, residual_TH, DIVISOR)
    own = _codes_error(codes, normed_TH)
    return own if residual_TH is None else max(own, inequality(residual_TH, sum_TH))


def _gate_inputs(activation: Activation, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gates beside what they gate, and the result in float64."""
    gate_up_T2I = (2 * torch.randn(NUM_ROWS, 2 * size, generator=generator())).to(dtype)
    gate_TI, up_TI = gate_up_T2I.double().chunk(2, dim=-1)
    functions: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu": torch.nn.functional.silu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    }
    return gate_up_T2I, functions[activation](gate_TI) * up_TI


def _gate(activation: Activation, size: int, dtype: torch.dtype, device: torch.device) -> float:
    gate_up_T2I, expected_TI = _gate_inputs(activation, size, dtype)
    return error(gated(gate_up_T2I.to(device), activation), expected_TI, ROUNDING[dtype])


def _gate_quantized(activation: Activation, size: int, dtype: torch.dtype, device: torch.device) -> float:
    gate_up_T2I, expected_TI = _gate_inputs(activation, size, dtype)
    return _codes_error(gated_quantized(gate_up_T2I.to(device), activation, DIVISOR), expected_TI)


def _codes_error(codes: tuple[Tensor, Tensor], expected_TK: Tensor) -> float:
    """Of codes and of the scale of each row."""
    codes_TK, scale_T1 = codes[0].cpu().double(), codes[1].cpu().double().unsqueeze(-1)
    largest_T1 = expected_TK.abs().amax(-1, keepdim=True)
    scale_error = float(((scale_T1 * DIVISOR - largest_T1).abs() / (largest_T1 * 4 * CODE_SLACK)).max())
    return max(scale_error, code_error(codes_TK * scale_T1, scale_T1, expected_TK, CODE_SLACK))


def _most_likely(dtype: torch.dtype, device: torch.device) -> float:
    """Ties go to the lowest id, and a row that is not finite has none."""
    logits_RV = torch.randn(4, VOCAB, generator=generator()).to(dtype)
    logits_RV[1, [77, 12_345]] = logits_RV[1].max() + 1
    logits_RV[2, 9_999] = torch.nan
    logits_RV[3, 5] = torch.inf
    highest_R1 = logits_RV[:2].amax(-1, keepdim=True)
    first = [int((row_V == highest).nonzero()[0]) for row_V, highest in zip(logits_RV[:2], highest_R1, strict=True)]
    return inequality(most_likely(logits_RV.to(device)), torch.tensor([*first, -1, -1]))
