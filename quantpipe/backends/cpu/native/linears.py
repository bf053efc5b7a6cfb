"""Packs stored weights for the compiled kernels: several linears that read the same input as one, where they can be.

Shapes: N out_features, K in_features, G groups along K.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.backends.cpu.linear import join
from quantpipe.backends.cpu.native.library import Library
from quantpipe.models.weights import LinearWeights


@dataclass(frozen=True)
class LinearSettings:
    """The rules for activations: the divisor of w8a8, and the bits (32: float32) under weight-only integers."""

    activation_divisor: float
    activation_bits: int


def make_linear(library: Library, weights: LinearWeights, settings: LinearSettings) -> int:
    """A handle, to be freed by ``qp_linear_free``. NativeError where the kernels have no such linear."""
    num_out, num_in = weights.weight_NK.shape
    bias_N = None if weights.bias_N is None else weights.bias_N.float().contiguous()
    if weights.scheme is None:
        is_bfloat16 = weights.weight_NK.dtype is torch.bfloat16
        weight_NK = (weights.weight_NK if is_bfloat16 else weights.weight_NK.float()).contiguous()
        name = "qp_linear_bf16" if is_bfloat16 else "qp_linear_f32"
        return library.make(name, num_out, num_in, address(weight_NK), address(bias_N))
    assert weights.scale_NG is not None, "quantized weights come with scales"
    weight_NK, scale_NG = weights.weight_NK.contiguous(), weights.scale_NG.float().contiguous()
    addresses = (address(weight_NK), address(scale_NG))
    if weights.scheme.activation_bits is not None:
        divisor = settings.activation_divisor
        return library.make("qp_linear_w8a8", num_out, num_in, *addresses, address(bias_N), divisor)
    zero_NG = None if weights.zero_NG is None else weights.zero_NG.contiguous()
    return library.make(
        "qp_linear_wint",
        weights.scheme.bits,
        num_out,
        num_in,
        num_in // scale_NG.shape[1],
        *addresses,
        address(zero_NG),
        address(bias_N),
        settings.activation_bits,
    )


def joined(parts: Sequence[LinearWeights]) -> list[LinearWeights]:
    """The parts as one where all are stored alike, else each by itself."""
    is_alike = len({(part.scheme, part.weight_NK.dtype) for part in parts}) == 1
    return [join(parts)] if is_alike else list(parts)


def address(tensor: Tensor | None) -> int | None:
    """Where a dense tensor begins; it must be kept for as long as that is read."""
    return None if tensor is None else tensor.data_ptr()
