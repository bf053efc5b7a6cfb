"""What every solver is given and gives back. Knows no model.

Shapes: N out_features, K in_features, G groups along K.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import WeightScheme


@dataclass(frozen=True)
class SolverOptions:
    """Settings of solvers; each reads those it knows.

    ``damp_frac`` is the share of the mean diagonal added to the Hessian. ``scales`` is what a scale is chosen by: the
    largest weight, the squared rounding error, or that error weighted with the Hessian's diagonal. ``signed_scales``
    allows negative ones. ``correction_frac`` is how much of the inputs' own error is made up for, where it is known.
    """

    damp_frac: float = 0.01
    scales: Literal["absmax", "mse", "hessian"] = "hessian"
    signed_scales: bool = False
    correction_frac: float = 0.25


@dataclass(frozen=True)
class Statistics:
    """What a linear reads, over ``num_tokens`` calibration tokens (float32).

    ``hessian_KK`` is the mean of x^T x. ``cross_KK``, where the full-precision inputs x_full of the same tokens are
    known, is the mean of (x_full - x)^T x.
    """

    hessian_KK: Tensor
    cross_KK: Tensor | None = None
    num_tokens: int = 0


@dataclass(frozen=True)
class SolverInput:
    """One weight [N, K] (float32), how to store it, and what it reads; None for solvers that read no data."""

    weight_NK: Tensor
    scheme: WeightScheme
    scale_dtype: torch.dtype
    statistics: Statistics | None = None
    options: SolverOptions = SolverOptions()


@dataclass(frozen=True)
class RowErrors:
    """x^T x-weighted squared error of each row, [N] in float64: of a solution, and of rounding to nearest."""

    solution_N: Tensor
    nearest_N: Tensor


@dataclass(frozen=True)
class Solution:
    """Integers [N, K] (int8), scales [N, G] in their stored dtype, and zero points [N, G] (int8; None if symmetric).

    ``damp_frac`` is the damping that was needed (0 if none); ``num_rows_nearest`` counts rows for which rounding to
    nearest was as good as anything else. ``errors`` are there where the solver had to work them out itself.
    """

    q_NK: Tensor
    scale_NG: Tensor
    zero_NG: Tensor | None = None
    damp_frac: float = 0.0
    num_rows_nearest: int = 0
    errors: RowErrors | None = None

    def dequantized(self) -> Tensor:
        """The weights that are stored, float32 [N, K]."""
        return decode(self.q_NK, self.scale_NG, self.zero_NG)


class Solver(Protocol):
    """Chooses integers and scales for one weight."""

    def __call__(self, given: SolverInput) -> Solution: ...


def output_error(weight_NK: Tensor, solution: Solution, hessian_KK: Tensor | None) -> float:
    """Relative squared error of the layer's output, tr(D H D^T) / tr(W H W^T) with D the weight error.

    Without statistics H is the identity, which gives the relative squared error of the weights.
    """
    error_N = row_energy(weight_NK - solution.dequantized(), hessian_KK)
    energy_N = row_energy(weight_NK, hessian_KK)
    return float(error_N.sum() / energy_N.sum().clamp_min(torch.finfo(torch.float64).tiny))


def row_energy(matrix_NK: Tensor, hessian_KK: Tensor | None) -> Tensor:
    """m H m^T for each row m, [N] in float64: the mean squared output of that row; H None is the identity."""
    weighted_NK = matrix_NK if hessian_KK is None else matrix_NK @ hessian_KK
    return (weighted_NK * matrix_NK).sum(1, dtype=torch.float64)
