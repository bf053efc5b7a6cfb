"""Linears of one model on a GPU: which kernel each runs on, and several that read the same input as one.

Shapes: T rows, N out_features (n of one part), K in_features, G groups along K.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantpipe.backends.triton.ops.dense import dense_matmul
from quantpipe.backends.triton.ops.int8 import int8_matmul, pack_int8, quantize_activations
from quantpipe.backends.triton.ops.weight_only import weight_only_matmul
from quantpipe.backends.triton.ops.weight_panels import PackedWeights, check_scheme, pack_weights
from quantpipe.formats.scheme import WeightScheme
from quantpipe.models.weights import LinearWeights, num_bytes


class _Part(Protocol):
    """Linears in one scheme, their output features one below the other."""

    @property
    def out_features(self) -> int: ...

    def tensors(self) -> list[Tensor]: ...

    def multiply(self, x_TK: Tensor, y_Tn: Tensor) -> None: ...


@dataclass(frozen=True)
class _Dense:
    weight_nK: Tensor
    bias_n: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight_nK.shape[0]

    def tensors(self) -> list[Tensor]:
        return [self.weight_nK, *_there(self.bias_n)]

    def multiply(self, x_TK: Tensor, y_Tn: Tensor) -> None:
        dense_matmul(x_TK, self.weight_nK, self.bias_n, y_Tn)


@dataclass(frozen=True)
class _WeightOnly:
    weights: PackedWeights
    bias_n: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weights.out_features

    def tensors(self) -> list[Tensor]:
        return [*self.weights.tensors(), *_there(self.bias_n)]

    def multiply(self, x_TK: Tensor, y_Tn: Tensor) -> None:
        weight_only_matmul(x_TK, self.weights, self.bias_n, y_Tn)


@dataclass(frozen=True)
class _Int8:
    weight_nK: Tensor
    scale_n: Tensor
    bias_n: Tensor | None
    activation_divisor: float

    @property
    def out_features(self) -> int:
        return self.weight_nK.shape[0]

    def tensors(self) -> list[Tensor]:
        return [self.weight_nK, self.scale_n, *_there(self.bias_n)]

    def multiply(self, x_TK: Tensor, y_Tn: Tensor) -> None:
        self.multiply_quantized(*quantize_activations(x_TK, self.activation_divisor), y_Tn)

    def multiply_quantized(self, xq_TK: Tensor, scale_T: Tensor, y_Tn: Tensor) -> None:
        int8_matmul(xq_TK, scale_T, self.weight_nK, self.scale_n, self.bias_n, y_Tn)


class TritonLinear:
    """y = x @ weight.T + bias of one or several linears, side by side in the order in which they were given."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._ends = [0, *itertools.accumulate(part.out_features for part in parts)]
        self.weight_bytes = num_bytes([tensor for part in parts for tensor in part.tensors()])

    @property
    def out_features(self) -> int:
        return self._ends[-1]

    @property
    def accepts_quantized(self) -> bool:
        """Whether activations may come as 8-bit codes: every part of it multiplies those."""
        return all(isinstance(part, _Int8) for part in self._parts)

    def __call__(self, x_TK: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """[T, N] in ``out_dtype``, else in x's dtype. Logits are asked for in float32: rounding would tie them."""
        y_TN = torch.empty(x_TK.shape[0], self.out_features, dtype=out_dtype or x_TK.dtype, device=x_TK.device)
        for part, start, end in zip(self._parts, self._ends, self._ends[1:], strict=False):
            part.multiply(x_TK, y_TN[:, start:end])
        return y_TN

    def from_quantized(self, xq_TK: Tensor, scale_T: Tensor, dtype: torch.dtype) -> Tensor:
        """[T, N] in ``dtype`` from int8 codes and a float32 scale for each row, where ``accepts_quantized``."""
        y_TN = torch.empty(xq_TK.shape[0], self.out_features, dtype=dtype, device=xq_TK.device)
        for part, start, end in zip(self._parts, self._ends, self._ends[1:], strict=False):
            assert isinstance(part, _Int8), "this linear multiplies activations as they are"
            part.multiply_quantized(xq_TK, scale_T, y_TN[:, start:end])
        return y_TN


def build_linear(
    parts: Sequence[LinearWeights], device: torch.device, dtype: torch.dtype, activation_divisor: float
) -> TritonLinear:
    """Move linears that read the same input to ``device`` and repack them there.

    Neighbours in one scheme become one product. Weights in floating point are held in ``dtype``, that of activations.
    RecipeError where no kernel takes a scheme.
    """
    for part in parts:
        check_kernels(part.scheme)
    runs = [list(run) for _, run in itertools.groupby(parts, key=lambda part: (part.scheme, _scale_dtype(part)))]
    return TritonLinear([_build_part(run, device, dtype, activation_divisor) for run in runs])


def check_kernels(scheme: WeightScheme | None) -> None:
    """Raise RecipeError, before anything is loaded, where no kernel takes a scheme."""
    if scheme is not None and scheme.activation_bits is None:
        check_scheme(scheme)


def _build_part(
    parts: Sequence[LinearWeights], device: torch.device, dtype: torch.dtype, activation_divisor: float
) -> _Part:
    scheme, bias_n = parts[0].scheme, _bias(parts, device)
    if scheme is None:
        return _Dense(_side_by_side([part.weight_NK.to(device, dtype) for part in parts]), bias_n)
    weight_nK = _side_by_side([part.weight_NK.to(device) for part in parts])
    scale_nG = torch.cat([scale.to(device) for part in parts for scale in _there(part.scale_NG)])
    if scheme.activation_bits is not None:
        return _Int8(pack_int8(weight_nK), scale_nG.float().flatten(), bias_n, activation_divisor)
    zeros = [zero.to(device) for part in parts for zero in _there(part.zero_NG)]
    return _WeightOnly(pack_weights(weight_nK, scale_nG, torch.cat(zeros) if zeros else None, scheme), bias_n)


def _side_by_side(weights: list[Tensor]) -> Tensor:
    """One below the other; a single one is not copied, so that a tied head stays the embedding."""
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _bias(parts: Sequence[LinearWeights], device: torch.device) -> Tensor | None:
    """The biases in float32, zero for a part without one; None where no part has one."""
    if all(part.bias_N is None for part in parts):
        return None
    biases = [torch.zeros(part.weight_NK.shape[0]) if part.bias_N is None else part.bias_N for part in parts]
    return torch.cat([bias.to(device, torch.float32) for bias in biases])


def _scale_dtype(part: LinearWeights) -> torch.dtype | None:
    return None if part.scale_NG is None else part.scale_NG.dtype


def _there(tensor: Tensor | None) -> list[Tensor]:
    return [] if tensor is None else [tensor]
