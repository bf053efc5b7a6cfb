"""Builds the linears of one model: which kernel each runs on, and several that read the same input as one.

Shapes: T rows, N out_features, K in_features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantpipe.backends.cpu.expanded import ExpandedLinear
from quantpipe.backends.cpu.int8 import make_int8_linear
from quantpipe.backends.cpu.kernel_check import CpuLinear
from quantpipe.backends.cpu.matmul import matmul
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.backends.cpu.weight_only import make_weight_only_linear
from quantpipe.models.weights import LinearWeights, num_bytes


class DenseLinear:
    """Float32 weights."""

    def __init__(self, weight_NK: Tensor) -> None:
        self._weight_NK = weight_NK
        self.weight_bytes = num_bytes([weight_NK])

    def __call__(self, x_TK: Tensor) -> Tensor:
        return matmul(x_TK, self._weight_NK)


class BiasedLinear:
    """Adds a bias to what another linear computes."""

    def __init__(self, linear: CpuLinear, bias_N: Tensor) -> None:
        self._linear, self._bias_N = linear, bias_N
        self.weight_bytes = linear.weight_bytes + num_bytes([bias_N])

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._linear(x_TK).add_(self._bias_N)


class SideBySideLinear:
    """Linears in different schemes that read the same input, their outputs joined."""

    def __init__(self, parts: Sequence[CpuLinear]) -> None:
        self._parts = parts
        self.weight_bytes = sum(part.weight_bytes for part in parts)

    def __call__(self, x_TK: Tensor) -> Tensor:
        return torch.cat([part(x_TK) for part in self._parts], dim=1)


class LinearBuilder:
    """Builds linears that share one scratch buffer; ``notes`` collects what a user should know of the choices made."""

    def __init__(self, activation_divisor: float) -> None:
        self._activation_divisor = activation_divisor
        self._scratch = Scratch()
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._notes)

    def build(self, parts: Sequence[LinearWeights]) -> CpuLinear:
        """One linear out of several that read the same input: a single matmul where they share a scheme."""
        if len({part.scheme for part in parts}) > 1:
            return SideBySideLinear([self._build_one(part) for part in parts])
        return self._build_one(join(parts))

    def build_head(self, weights: LinearWeights) -> CpuLinear:
        """The output head. Its logits are never rounded to bfloat16: that would tie candidates that differ."""
        if weights.scheme is None or weights.scheme.activation_bits is not None:
            return self.build([weights])
        self._notes[f"lm_head: {weights.scheme.name} weights are expanded to float32 for each product"] = None
        linear = ExpandedLinear(weights, self._scratch, torch.float32, rounds=False)
        return linear if weights.bias_N is None else BiasedLinear(linear, weights.bias_N)

    def _build_one(self, weights: LinearWeights) -> CpuLinear:
        linear = self._build_unbiased(weights)
        return linear if weights.bias_N is None else BiasedLinear(linear, weights.bias_N)

    def _build_unbiased(self, weights: LinearWeights) -> CpuLinear:
        if weights.scheme is None:
            return DenseLinear(weights.weight_NK.float())
        if weights.scheme.activation_bits is None:
            linear, note = make_weight_only_linear(weights, self._scratch)
        else:
            linear, note = make_int8_linear(weights, self._activation_divisor, self._scratch)
        self._notes[note] = None
        return linear


def join(parts: Sequence[LinearWeights]) -> LinearWeights:
    """Stack the output channels of linears in one scheme; a missing bias is zero where another part has one."""
    if len(parts) == 1:
        return parts[0]
    scales = [part.scale_NG for part in parts if part.scale_NG is not None]
    zeros = [part.zero_NG for part in parts if part.zero_NG is not None]
    biases = [torch.zeros(part.weight_NK.shape[0]) if part.bias_N is None else part.bias_N for part in parts]
    return LinearWeights(
        torch.cat([part.weight_NK for part in parts]),
        torch.cat(scales) if scales else None,
        torch.cat(biases) if any(part.bias_N is not None for part in parts) else None,
        parts[0].scheme,
        torch.cat(zeros) if zeros else None,
    )
