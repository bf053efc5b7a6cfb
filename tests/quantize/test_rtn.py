import torch

from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import w4a16
from quantpipe.quantize.rtn import solve_rtn
from quantpipe.quantize.solver import SolverInput


def test_weights_on_the_grid_are_kept_exactly() -> None:
    q_NK = torch.randint(-7, 8, (6, 64), generator=torch.Generator().manual_seed(0)).float()
    q_NK[:, ::32] = 7.5  # the absmax of each group, so that the scale is 0.25
    weight_NK = q_NK * 0.25
    solution = solve_rtn(SolverInput(weight_NK, w4a16(32), torch.float32))
    kept = torch.ones(64, dtype=torch.bool)
    kept[::32] = False
    assert torch.equal(decode(solution.q_NK, solution.scale_NG)[:, kept], weight_NK[:, kept])


def test_scales_are_rounded_before_they_are_used() -> None:
    weight_NK = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    solution = solve_rtn(SolverInput(weight_NK, w4a16(32), torch.bfloat16))
    assert solution.scale_NG.dtype is torch.bfloat16
    groups = weight_NK.reshape(6, 2, 32) / solution.scale_NG.float().unsqueeze(-1)
    assert torch.equal(solution.q_NK.reshape(6, 2, 32).float(), groups.round().clamp(-8, 7))
