"""Round to nearest: absmax scales, no data."""

from quantpipe.formats.layout import absmax_scale, encode
from quantpipe.quantize.solver import Solution, SolverInput


def solve_rtn(given: SolverInput) -> Solution:
    """The format's own rounding with absmax scales; statistics, if any, are not looked at."""
    scale_NG = absmax_scale(given.weight_NK, given.scheme, given.scale_dtype)
    return Solution(encode(given.weight_NK, scale_NG, given.scheme), scale_NG)
