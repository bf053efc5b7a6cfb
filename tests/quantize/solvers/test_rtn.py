import pytest
import torch

from quantpipe.errors import DataError
from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import w4a16, weight_only
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import SolverInput, SolverOptions, Statistics, output_error

PLAIN = SolverOptions(scales="absmax")


def test_weights_on_the_grid_are_kept_exactly() -> None:
    q_NK = torch.randint(-7, 8, (6, 64), generator=torch.Generator().manual_seed(0)).float()
    q_NK[:, ::32] = 7.5  # the absmax of each group, so that the scale is 0.25
    weight_NK = q_NK * 0.25
    solution = solve_rtn(SolverInput(weight_NK, w4a16(32), torch.float32, None, PLAIN))
    kept = torch.ones(64, dtype=torch.bool)
    kept[::32] = False
    assert torch.equal(decode(solution.q_NK, solution.scale_NG)[:, kept], weight_NK[:, kept])


def test_scales_are_rounded_before_they_are_used() -> None:
    weight_NK = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    solution = solve_rtn(SolverInput(weight_NK, w4a16(32), torch.bfloat16, None, PLAIN))
    assert solution.scale_NG.dtype is torch.bfloat16
    groups = weight_NK.reshape(6, 2, 32) / solution.scale_NG.float().unsqueeze(-1)
    assert torch.equal(solution.q_NK.reshape(6, 2, 32).float(), groups.round().clamp(-8, 7))


@pytest.mark.parametrize("symmetric", [True, False])
def test_each_kind_of_scales_is_best_in_its_own_measure(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(32, 128, generator=generator)
    hessian_KK = torch.diag(torch.rand(128, generator=generator) ** 4 + 1e-3)
    scheme = weight_only(3, 32, symmetric)
    solutions = {
        scales: solve_rtn(
            SolverInput(weight_NK, scheme, torch.float32, Statistics(hessian_KK), SolverOptions(scales=scales))
        )
        for scales in ("absmax", "mse", "hessian")
    }
    plain = {scales: output_error(weight_NK, each, None) for scales, each in solutions.items()}
    weighted = {scales: output_error(weight_NK, each, hessian_KK) for scales, each in solutions.items()}
    assert min(plain, key=lambda scales: plain[scales]) == "mse"
    assert min(weighted, key=lambda scales: weighted[scales]) == "hessian"


def test_weighted_scales_without_statistics_are_refused() -> None:
    with pytest.raises(DataError, match="need calibration statistics"):
        solve_rtn(SolverInput(torch.ones(2, 32), w4a16(32), torch.float32, None, SolverOptions(scales="hessian")))


@pytest.mark.parametrize("scales", ["absmax", "mse", "hessian"])
def test_zero_groups_dead_channels_and_huge_channels_stay_finite_in_float16(scales: str) -> None:
    weight_NK = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    weight_NK[0, :32] = 0.0
    weight_NK[1] *= 6e4
    hessian_KK = torch.eye(64)
    hessian_KK[5, 5] = 0.0
    given = SolverInput(weight_NK, w4a16(32), torch.float16, Statistics(hessian_KK), SolverOptions(scales=scales))  # type: ignore[arg-type]
    solution = solve_rtn(given)
    assert torch.isfinite(solution.dequantized()).all()
    assert torch.equal(solution.dequantized()[0, :32], torch.zeros(32))
    assert (solution.scale_NG > 0).all()
