"""Round to nearest: with absmax scales, or with searched ones."""

from quantpipe.errors import DataError
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale
from quantpipe.quantize.solvers.scales import round_weight
from quantpipe.quantize.solvers.solver import Solution, SolverInput


def solve_rtn(given: SolverInput) -> Solution:
    """The format's own rounding. Raises DataError where ``scales: hessian`` is asked for without statistics."""
    scales = given.options.scales
    if scales == "absmax":
        return _cover_every_weight(given)
    if scales == "mse":
        return round_weight(given.weight_NK, given.scheme, given.scale_dtype, None, given.options.signed_scales)
    if given.statistics is None:
        raise DataError("solver rtn: scales 'hessian' need calibration statistics, and none were collected")
    importance_K = given.statistics.hessian_KK.diagonal()
    return round_weight(given.weight_NK, given.scheme, given.scale_dtype, importance_K, given.options.signed_scales)


def _cover_every_weight(given: SolverInput) -> Solution:
    if given.scheme.symmetric:
        scale_NG = absmax_scale(given.weight_NK, given.scheme, given.scale_dtype)
        return Solution(encode(given.weight_NK, scale_NG, given.scheme), scale_NG)
    scale_NG, zero_NG = minmax_scale(given.weight_NK, given.scheme, given.scale_dtype)
    return Solution(encode(given.weight_NK, scale_NG, given.scheme, zero_NG), scale_NG, zero_NG)
