"""Turning weights into integers: solvers, the block-by-block loop, and what it runs on.

To add a solver: one file, one line in ``SOLVERS``, one member of ``quantpipe.recipe``'s solver union.
"""

from quantpipe.quantize.gptq import solve_gptq
from quantpipe.quantize.rtn import solve_rtn
from quantpipe.quantize.solver import Solver

SOLVERS: dict[str, Solver] = {
    "rtn": solve_rtn,
    "gptq": solve_gptq,
}
