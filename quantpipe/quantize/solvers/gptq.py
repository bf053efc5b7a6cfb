"""GPTQ: quantize a column at a time and let the columns still to come make up for the error.

Shapes: N out_features, K in_features, G groups along K, B columns of one lazy block.
Sources: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
algorithm 1. Columns are visited in order of falling diag(H) (act-order); because each group's scale is fixed from the
original columns beforehand, the stored order is unchanged and readers need no permutation.
Li et al. 2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration": where the full-precision
inputs are known, the aim is the output that they would give.
"""

from dataclasses import replace

import torch
from torch import Tensor

from quantpipe.errors import DataError
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.scales import search_scale
from quantpipe.quantize.solvers.solver import RowErrors, Solution, SolverInput, SolverOptions, Statistics, row_energy

LAZY_COLUMNS = 64
SMALL_TRIANGLE = 256
DAMP_LADDER = (1.0, 3.0, 10.0, 30.0, 100.0)


def solve_gptq(given: SolverInput) -> Solution:
    """Minimise tr((T - Q) H (T - Q)^T); no row (output channel) ends worse by that measure than round to nearest.

    T is the weight, or, where ``Statistics.cross_KK`` is known, the weight that gives the full-precision output from
    the inputs at hand (see ``_target``). Raises DataError where the statistics are missing or not finite.
    """
    statistics = given.statistics
    if statistics is None:
        raise DataError("solver gptq: no calibration statistics were collected for this layer")
    read = [statistics.hessian_KK, *([] if statistics.cross_KK is None else [statistics.cross_KK])]
    if not all(bool(torch.isfinite(each_KK).all()) for each_KK in read):
        raise DataError("solver gptq: calibration activations are not finite; check the base model's weights")
    hessian_KK = statistics.hessian_KK
    inverse_KK, order_K, damp_frac = _inverse_factor(hessian_KK, given.options.damp_frac)
    target_NK = _target(given, statistics, inverse_KK, order_K)
    scale_NG, zero_NG = search_scale(
        target_NK, given.scheme, given.scale_dtype, hessian_KK.diagonal(), given.options.signed_scales
    )
    q_NK = _compensate(target_NK, given.scheme, scale_NG, zero_NG, inverse_KK, order_K)
    solution = Solution(q_NK, scale_NG, zero_NG, damp_frac)
    return _guarded(given, solution, target_NK, hessian_KK)


def _guarded(given: SolverInput, solution: Solution, target_NK: Tensor, hessian_KK: Tensor) -> Solution:
    """``solution``, but rows rounded to nearest where that is better: a few outliers can mislead the greedy order."""
    plain = SolverInput(given.weight_NK, given.scheme, given.scale_dtype, None, SolverOptions(scales="absmax"))
    nearest = solve_rtn(plain)
    error_N = row_energy(target_NK - solution.dequantized(), hessian_KK)
    nearest_error_N = row_energy(target_NK - nearest.dequantized(), hessian_KK)
    errors = None
    if target_NK is given.weight_NK:
        errors = RowErrors(torch.minimum(error_N, nearest_error_N), nearest_error_N)
    worse_N = error_N > nearest_error_N
    if not bool(worse_N.any()):
        return replace(solution, errors=errors)
    worse_N1 = worse_N.unsqueeze(1)
    zero_NG = None
    if solution.zero_NG is not None and nearest.zero_NG is not None:
        zero_NG = torch.where(worse_N1, nearest.zero_NG, solution.zero_NG)
    return Solution(
        torch.where(worse_N1, nearest.q_NK, solution.q_NK),
        torch.where(worse_N1, nearest.scale_NG, solution.scale_NG),
        zero_NG,
        solution.damp_frac,
        int(worse_N.sum()),
        errors,
    )


def _inverse_factor(hessian_KK: Tensor, damp_frac: float) -> tuple[Tensor, Tensor, float]:
    """Upper triangular R with R^T R = H^-1 (rows in act-order), that order, and the damping that made it succeed.

    With H reversed in both directions equal to L L^T, R is L^-1 reversed. Damping bounds the condition number by
    K / damp_frac, so float32 will do. A dead input channel (zero diagonal) is given the mean of the others: its weights
    are rounded to nearest, and neither they nor the damping depend on the size of activations. The damping climbs a
    ladder until the factorisation succeeds.
    """
    hessian_KK = hessian_KK.clone()
    diagonal_K = hessian_KK.diagonal()
    is_alive_K = diagonal_K > 0
    mean_diagonal = float(diagonal_K[is_alive_K].mean()) if bool(is_alive_K.any()) else 1.0
    diagonal_K[~is_alive_K] = mean_diagonal
    order_K = torch.argsort(diagonal_K, descending=True, stable=True)
    backwards_K = order_K.flip(0)
    reversed_KK = hessian_KK[backwards_K][:, backwards_K]
    damp = 0.0
    for factor in DAMP_LADDER:
        damp_more = damp_frac * factor - damp
        damp = damp_frac * factor
        reversed_KK.diagonal().add_(damp_more * mean_diagonal)
        lower_KK, failed = torch.linalg.cholesky_ex(reversed_KK)
        if not int(failed):
            inverse_KK = _inverse_of_lower(lower_KK)
            if bool(torch.isfinite(inverse_KK).all()):
                return inverse_KK.flip(0, 1), order_K, damp
    raise DataError(
        f"solver gptq: the layer's Hessian stays singular with damp_frac {damp}; calibrate on more tokens, "
        "or raise quantize.solver.damp_frac"
    )


def _inverse_of_lower(lower_KK: Tensor) -> Tensor:
    """L^-1 by halves, so that nearly all of it is matrix products."""
    size = len(lower_KK)
    if size <= SMALL_TRIANGLE:
        identity_KK = torch.eye(size, dtype=lower_KK.dtype)
        small_KK: Tensor = torch.linalg.solve_triangular(lower_KK, identity_KK, upper=False)
        return small_KK
    half = size // 2
    inverse_KK = torch.zeros_like(lower_KK)
    first, second = (_inverse_of_lower(part) for part in (lower_KK[:half, :half], lower_KK[half:, half:]))
    inverse_KK[:half, :half], inverse_KK[half:, half:] = first, second
    inverse_KK[half:, :half] = -(second @ (lower_KK[half:, :half] @ first))
    return inverse_KK


def _target(given: SolverInput, statistics: Statistics, inverse_KK: Tensor, order_K: Tensor) -> Tensor:
    """What the rounded weight should be near to [N, K]: W, or W + alpha W C H^-1.

    With x_full = x + d and C the mean of d^T x, E|Q x - W x_full|^2 is least, over all Q, at Q = W + W C H^-1, and
    grows by (Q - that) H (Q - that)^T away from it: the same problem as before, with another target. All of the step
    would follow the noise of the calibration set too, so only ``correction_frac`` (alpha) of it is made.
    """
    if statistics.cross_KK is None or given.options.correction_frac == 0:
        return given.weight_NK
    cross_KK = statistics.cross_KK[:, order_K]
    step_KK = torch.empty_like(cross_KK)
    step_KK[:, order_K] = (cross_KK @ inverse_KK.T) @ inverse_KK
    return torch.addmm(given.weight_NK, given.weight_NK, step_KK, alpha=given.options.correction_frac)


def _compensate(
    target_NK: Tensor,
    scheme: WeightScheme,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    inverse_KK: Tensor,
    order_K: Tensor,
) -> Tensor:
    """The column loop. Works on the transposed weight, so that each column is contiguous. Returns integers [N, K]."""
    num_in = target_NK.shape[1]
    group_of_K = order_K // (num_in // scale_NG.shape[1])
    scale_KN = scale_NG.float().T[group_of_K].contiguous()
    zero_KN = None if zero_NG is None else zero_NG.float().T[group_of_K].contiguous()
    work_KN = target_NK.T[order_K].contiguous()
    q_KN = torch.empty_like(work_KN)
    pivots = inverse_KK.diagonal().tolist()
    for start in range(0, num_in, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, num_in)
        error_BN = torch.empty_like(work_KN[start:end])
        for k in range(start, end):
            q_N, error_N = q_KN[k], error_BN[k - start]
            torch.div(work_KN[k], scale_KN[k], out=q_N)
            if zero_KN is None:
                q_N.round_().clamp_(scheme.q_min, scheme.q_max)
                torch.addcmul(work_KN[k], q_N, scale_KN[k], value=-1.0, out=error_N)
            else:
                q_N.add_(zero_KN[k]).round_().clamp_(scheme.q_min, scheme.q_max)
                torch.addcmul(work_KN[k], q_N - zero_KN[k], scale_KN[k], value=-1.0, out=error_N)
            error_N.div_(pivots[k])
            if k + 1 < end:
                work_KN[k + 1 : end].addr_(inverse_KK[k, k + 1 : end], error_N, alpha=-1.0)
        work_KN[end:].addmm_(inverse_KK[start:end, end:].T, error_BN, alpha=-1.0)
    q_NK = torch.empty_like(target_NK, dtype=torch.int8)
    q_NK[:, order_K] = q_KN.T.to(torch.int8)
    return q_NK
