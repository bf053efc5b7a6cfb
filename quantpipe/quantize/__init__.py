"""Turning weights into integers: transforms, solvers, the block-by-block loop, and what it runs on.

To add a solver: one file, one line in ``SOLVERS``, one member of ``quantpipe.recipe``'s solver union.
To add a transform: one file, one line in ``TRANSFORMS``, one member of its transform union.
"""

from quantpipe.quantize.solvers.gptq import solve_gptq
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import Solver
from quantpipe.quantize.transforms.awq import apply_awq
from quantpipe.quantize.transforms.kv_smoothing import apply_k_smooth
from quantpipe.quantize.transforms.rotate import check_rotate, make_rotate
from quantpipe.quantize.transforms.smoothquant import apply_smoothquant
from quantpipe.quantize.transforms.transform import TransformCheck, TransformFactory, per_block

TRANSFORMS: dict[str, TransformFactory] = {
    "awq": per_block(apply_awq),
    "k_smooth": per_block(apply_k_smooth),
    "rotate": make_rotate,
    "smoothquant": per_block(apply_smoothquant),
}

# Those that refuse a model: what finds it out before calibration.
TRANSFORM_CHECKS: dict[str, TransformCheck] = {"rotate": check_rotate}

SOLVERS: dict[str, Solver] = {
    "rtn": solve_rtn,
    "gptq": solve_gptq,
}
