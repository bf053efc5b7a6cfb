import pytest
import torch
from torch import nn

from quantpipe.formats.scheme import w4a16, weight_only
from quantpipe.quantize.loop.solving import solve_together
from quantpipe.quantize.solvers.gptq import solve_gptq
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import SolverInput, SolverOptions, Statistics, output_error

NUM_ROWS = {"q": 8, "k": 4, "v": 6}


@pytest.fixture
def linears() -> dict[str, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    made = {name: nn.Linear(64, rows, bias=False) for name, rows in NUM_ROWS.items()}
    for linear in made.values():
        linear.weight.data = torch.randn(linear.weight.shape, generator=generator)
    return made


@pytest.fixture
def statistics() -> Statistics:
    x_TK = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 2, 64)
    return Statistics(x_TK.T @ x_TK / 256, None, 256)


def test_each_linear_gets_what_it_would_alone(linears: dict[str, nn.Linear], statistics: Statistics) -> None:
    """Mixed schemes and scale dtypes: rows that share both are solved as one matrix."""
    schemes = {"q": w4a16(32), "k": weight_only(8, 32), "v": w4a16(32)}
    dtypes = {"q": torch.bfloat16, "k": torch.bfloat16, "v": torch.float32}
    with torch.no_grad():
        solved = solve_together(linears, schemes, dtypes, solve_gptq, SolverOptions(), statistics)
        for name, linear in linears.items():
            given = SolverInput(linear.weight, schemes[name], dtypes[name], statistics, SolverOptions())
            alone = solve_gptq(given)
            weight, record = solved[name].weight, solved[name].record
            assert weight.scheme == schemes[name]
            assert torch.equal(weight.scale_NG, alone.scale_NG)
            # a product of more rows may add in another order
            assert (weight.q_NK == alone.q_NK).float().mean() > 0.99
            assert record.error_after == pytest.approx(
                output_error(linear.weight, alone, statistics.hessian_KK), rel=0.05
            )
            assert (record.name, record.scheme, record.num_tokens) == (name, schemes[name].label, 256)


@pytest.mark.parametrize("solver", [solve_rtn, solve_gptq])
def test_error_before_is_that_of_absmax_rounding(
    linears: dict[str, nn.Linear], statistics: Statistics, solver: object
) -> None:
    schemes, dtypes = dict.fromkeys(linears, w4a16(32)), dict.fromkeys(linears, torch.bfloat16)
    with torch.no_grad():
        solved = solve_together(linears, schemes, dtypes, solver, SolverOptions(), statistics)  # type: ignore[arg-type]
        for name, linear in linears.items():
            plain = SolverInput(linear.weight, w4a16(32), torch.bfloat16, None, SolverOptions(scales="absmax"))
            expected = output_error(linear.weight, solve_rtn(plain), statistics.hessian_KK)
            assert solved[name].record.error_before == pytest.approx(expected, rel=1e-4)
            assert solved[name].record.error_after < expected
