import torch

from quantpipe.formats.scheme import w8a8
from quantpipe.quantize import SOLVERS
from quantpipe.quantize.solvers.solver import Solution, SolverInput, Statistics, output_error
from quantpipe.recipe.quantize_section import GptqSolver, RtnSolver


def test_table_of_solvers_equals_what_recipes_may_name() -> None:
    named = {option.model_fields["name"].annotation.__args__[0] for option in (RtnSolver, GptqSolver)}
    assert set(SOLVERS) == named


def test_every_solver_gives_integers_in_range_and_scales_in_the_stored_dtype() -> None:
    for solver in SOLVERS.values():
        given = SolverInput(torch.randn(4, 32), w8a8(), torch.float16, Statistics(torch.eye(32)))
        solution = solver(given)
        assert solution.q_NK.dtype is torch.int8
        assert solution.q_NK.shape == (4, 32)
        assert solution.scale_NG.dtype is torch.float16
        assert solution.scale_NG.shape == (4, 1)


def test_error_is_zero_for_exact_and_one_for_all_zero_weights() -> None:
    weight_NK = torch.tensor([[1.0, -2.0], [3.0, 0.0]])
    exact = Solution(weight_NK.to(torch.int8), torch.ones(2, 1))
    nothing = Solution(torch.zeros(2, 2, dtype=torch.int8), torch.ones(2, 1))
    assert output_error(weight_NK, exact, None) == 0.0
    assert output_error(weight_NK, nothing, torch.tensor([[2.0, 0.5], [0.5, 1.0]])) == 1.0
