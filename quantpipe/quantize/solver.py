"""What every solver is given and gives back. Knows no model.

Shapes: N out_features, K in_features, G groups along K.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import WeightScheme


@dataclass(frozen=True)
class SolverInput:
    """One weight [N, K] (float32), how to store it, and the mean of x^T x over calibration tokens [K, K] (float32).

    ``hessian_KK`` is None for solvers that read no data. ``damp_frac`` is the share of the mean diagonal added to it.
    """

    weight_NK: Tensor
    scheme: WeightScheme
    scale_dtype: torch.dtype
    hessian_KK: Tensor | None = None
    damp_frac: float = 0.01


@dataclass(frozen=True)
class Solution:
    """Integers [N, K] (int8), scales [N, G] in their stored dtype, and the damping that was needed (0 if none)."""

    q_NK: Tensor
    scale_NG: Tensor
    damp_frac: float = 0.0


class Solver(Protocol):
    """Chooses integers and scales for one weight."""

    def __call__(self, given: SolverInput) -> Solution: ...


def output_error(weight_NK: Tensor, solution: Solution, hessian_KK: Tensor | None) -> float:
    """Relative squared error of the layer's output, tr(D H D^T) / tr(W H W^T) with D the weight error.

    Without statistics H is the identity, which gives the relative squared error of the weights.
    """
    error_N = row_energy(weight_NK - decode(solution.q_NK, solution.scale_NG), hessian_KK)
    energy_N = row_energy(weight_NK, hessian_KK)
    return float(error_N.sum() / energy_N.sum().clamp_min(torch.finfo(torch.float64).tiny))


def row_energy(matrix_NK: Tensor, hessian_KK: Tensor | None) -> Tensor:
    """m H m^T for each row m, [N] in float64: the mean squared output of that row; H None is the identity."""
    weighted_NK = matrix_NK if hessian_KK is None else matrix_NK @ hessian_KK
    return (weighted_NK.double() * matrix_NK.double()).sum(1)
