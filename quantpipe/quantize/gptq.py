"""GPTQ: quantize a column at a time and let the columns still to come make up for the error.

Shapes: N out_features, K in_features, G groups along K, B columns of one lazy block.
Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
algorithm 1. Columns are visited in order of falling diag(H) (act-order); because each group's scale is fixed from the
original columns beforehand, the stored order is unchanged and readers need no permutation.
"""

import torch
from torch import Tensor

from quantpipe.errors import DataError
from quantpipe.formats.layout import absmax_scale, cast_scale, decode, encode
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.rtn import solve_rtn
from quantpipe.quantize.solver import Solution, SolverInput, row_energy

LAZY_COLUMNS = 128
# Candidate scales as fractions of absmax; 1 is among them, so the search never does worse by its own measure.
SCALE_FRACTIONS = tuple(1.0 - 0.02 * step for step in range(26))
DAMP_LADDER = (1.0, 3.0, 10.0, 30.0, 100.0)


def solve_gptq(given: SolverInput) -> Solution:
    """Minimise tr((W - Q) H (W - Q)^T); no row (output channel) ends worse by that measure than round to nearest.

    Raises DataError where the statistics are missing or not finite.
    """
    hessian_KK = given.hessian_KK
    if hessian_KK is None:
        raise DataError("solver gptq: no calibration statistics were collected for this layer")
    if not bool(torch.isfinite(hessian_KK).all()):
        raise DataError("solver gptq: calibration activations are not finite; check the base model's weights")
    scale_NG = _search_scales(given, hessian_KK.diagonal())
    inverse_KK, order_K, damp_frac = _inverse_factor(hessian_KK, given.damp_frac)
    q_NK = _compensate(given, scale_NG, inverse_KK, order_K)
    nearest = solve_rtn(given)
    worse_N1 = (
        row_energy(given.weight_NK - decode(q_NK, scale_NG), hessian_KK)
        > row_energy(given.weight_NK - decode(nearest.q_NK, nearest.scale_NG), hessian_KK)
    ).unsqueeze(1)
    return Solution(
        torch.where(worse_N1, nearest.q_NK, q_NK), torch.where(worse_N1, nearest.scale_NG, scale_NG), damp_frac
    )


def _search_scales(given: SolverInput, importance_K: Tensor) -> Tensor:
    """Scales [N, G] that minimise the rounding error weighted with diag(H), over ``SCALE_FRACTIONS`` of absmax."""
    weight_NK, scheme = given.weight_NK, given.scheme
    absmax_NG = absmax_scale(weight_NK, scheme, torch.float32)
    best_NG = cast_scale(absmax_NG, given.scale_dtype)
    best_error_NG = _group_error(weight_NK, best_NG, scheme, importance_K)
    for fraction in SCALE_FRACTIONS[1:]:
        scale_NG = cast_scale(absmax_NG * fraction, given.scale_dtype)
        error_NG = _group_error(weight_NK, scale_NG, scheme, importance_K)
        better_NG = error_NG < best_error_NG
        best_NG = torch.where(better_NG, scale_NG, best_NG)
        best_error_NG = torch.where(better_NG, error_NG, best_error_NG)
    return best_NG


def _group_error(weight_NK: Tensor, scale_NG: Tensor, scheme: WeightScheme, importance_K: Tensor) -> Tensor:
    error_NK = (weight_NK - decode(encode(weight_NK, scale_NG, scheme), scale_NG)).square_()
    return (error_NK * importance_K).reshape(*scale_NG.shape, -1).sum(-1)


def _inverse_factor(hessian_KK: Tensor, damp_frac: float) -> tuple[Tensor, Tensor, float]:
    """Upper Cholesky factor of H^-1 with rows in act-order, that order, and the damping that made it succeed.

    Works in float64. A dead input channel (zero diagonal) is given a diagonal of one: its weights are rounded
    to nearest and disturb nothing. The damping climbs a ladder until the factorisation succeeds.
    """
    hessian_KK = hessian_KK.double().clone()
    diagonal_K = hessian_KK.diagonal()
    diagonal_K[diagonal_K <= 0] = 1.0
    order_K = torch.argsort(diagonal_K, descending=True, stable=True)
    hessian_KK = hessian_KK[order_K][:, order_K]
    mean_diagonal = float(hessian_KK.diagonal().mean())
    for factor in DAMP_LADDER:
        damp = damp_frac * factor
        damped_KK = hessian_KK + damp * mean_diagonal * torch.eye(len(order_K), dtype=torch.float64)
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if not int(failed):
            upper_KK, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_KK), upper=True)
            if not int(failed):
                return upper_KK.float(), order_K, damp
    raise DataError(
        f"solver gptq: the layer's Hessian stays singular with damp_frac {damp}; calibrate on more tokens, "
        "or raise quantize.solver.damp_frac"
    )


def _compensate(given: SolverInput, scale_NG: Tensor, inverse_KK: Tensor, order_K: Tensor) -> Tensor:
    """The column loop. Works on the transposed weight, so that each column is contiguous. Returns integers [N, K]."""
    scheme, weight_NK = given.scheme, given.weight_NK
    num_in = weight_NK.shape[1]
    group_of_K = order_K // (num_in // scale_NG.shape[1])
    scale_KN = scale_NG.float().T[group_of_K].contiguous()
    work_KN = weight_NK.T[order_K].contiguous()
    q_KN = torch.empty_like(work_KN)
    for start in range(0, num_in, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, num_in)
        error_BN = torch.empty_like(work_KN[start:end])
        for k in range(start, end):
            q_N = (work_KN[k] / scale_KN[k]).round_().clamp_(scheme.q_min, scheme.q_max)
            q_KN[k] = q_N
            error_BN[k - start] = (work_KN[k] - q_N * scale_KN[k]) / inverse_KK[k, k]
            if k + 1 < end:
                work_KN[k + 1 : end].addr_(inverse_KK[k, k + 1 : end], error_BN[k - start], alpha=-1.0)
        work_KN[end:].addmm_(inverse_KK[start:end, end:].T, error_BN, alpha=-1.0)
    q_NK = torch.empty_like(weight_NK, dtype=torch.int8)
    q_NK[:, order_K] = q_KN.T.to(torch.int8)
    return q_NK
