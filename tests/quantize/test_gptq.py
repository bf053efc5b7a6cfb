import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.errors import DataError
from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8
from quantpipe.quantize.gptq import solve_gptq
from quantpipe.quantize.observers import HessianObserver
from quantpipe.quantize.rtn import solve_rtn
from quantpipe.quantize.solver import SolverInput, output_error, row_energy


def given_input(
    scheme: WeightScheme, num_tokens: int = 256, num_in: int = 64, num_out: int = 48, seed: int = 0
) -> SolverInput:
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(num_out, num_in, generator=generator)
    mixing_KK = torch.randn(num_in, num_in, generator=generator) / num_in**0.5
    x_TK = torch.randn(num_tokens, num_in, generator=generator) @ mixing_KK
    observer = HessianObserver(num_in)
    observer.update(x_TK)
    return SolverInput(weight_NK, scheme, torch.bfloat16, observer.mean_KK)


@pytest.mark.parametrize("scheme", [w4a16(32), w4a16(64), w8a8()], ids=lambda s: f"{s.name}-{s.group_size}")
def test_correlated_inputs_are_quantized_much_better_than_by_rounding(scheme: WeightScheme) -> None:
    problem = given_input(scheme)
    solved, nearest = solve_gptq(problem), solve_rtn(problem)
    errors = [output_error(problem.weight_NK, each, problem.hessian_KK) for each in (solved, nearest)]
    assert errors[0] < 0.7 * errors[1]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 80), st.integers(0, 1000))
def test_no_output_channel_is_worse_than_rounding(num_tokens: int, seed: int) -> None:
    problem = given_input(w4a16(32), num_tokens=num_tokens, seed=seed)
    solved, nearest = solve_gptq(problem), solve_rtn(problem)

    def error_N(solution: object) -> torch.Tensor:
        decoded_NK = decode(solution.q_NK, solution.scale_NG)  # type: ignore[attr-defined]
        return row_energy(problem.weight_NK - decoded_NK, problem.hessian_KK)

    assert (error_N(solved) <= error_N(nearest) * (1 + 1e-6)).all()


def test_singular_hessian_with_duplicate_channels_is_damped_and_finished() -> None:
    x_TK = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    x_TK[:, 1] = x_TK[:, 0]
    observer = HessianObserver(64)
    observer.update(x_TK)
    weight_NK = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    solution = solve_gptq(SolverInput(weight_NK, w4a16(32), torch.float16, observer.mean_KK))
    assert solution.damp_frac > 0
    assert torch.isfinite(decode(solution.q_NK, solution.scale_NG)).all()


def test_dead_channel_keeps_its_rounded_weights() -> None:
    problem = given_input(w4a16(32))
    hessian_KK = problem.hessian_KK.clone()  # type: ignore[union-attr]
    hessian_KK[5] = 0
    hessian_KK[:, 5] = 0
    solution = solve_gptq(SolverInput(problem.weight_NK, problem.scheme, torch.float32, hessian_KK))
    decoded_N = decode(solution.q_NK, solution.scale_NG)[:, 5]
    # scales may have shrunk below absmax, so compare only weights inside the representable range
    inside_N = problem.weight_NK[:, 5].abs() < 7 * solution.scale_NG[:, 0]
    assert inside_N.sum() > 10
    assert ((decoded_N - problem.weight_NK[:, 5]).abs() <= 0.51 * solution.scale_NG[:, 0])[inside_N].all()


def test_stored_order_of_columns_is_kept() -> None:
    """Act-order visits columns by importance; where nothing is correlated the result is plain rounding, in place."""
    weight_NK = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    hessian_KK = torch.diag(torch.rand(64, generator=torch.Generator().manual_seed(6)) + 0.1)
    solution = solve_gptq(SolverInput(weight_NK, w8a8(), torch.float32, hessian_KK))
    assert ((decode(solution.q_NK, solution.scale_NG) - weight_NK).abs() <= 2 * solution.scale_NG).all()


def test_same_input_gives_the_same_solution_and_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    first, second = (solve_gptq(given_input(w4a16(32))) for _ in range(2))
    assert torch.equal(first.q_NK, second.q_NK)
    assert torch.equal(first.scale_NG, second.scale_NG)
    assert torch.equal(torch.get_rng_state(), state)


def test_missing_or_infinite_statistics_are_refused() -> None:
    problem = given_input(w4a16(32))
    with pytest.raises(DataError, match="no calibration statistics"):
        solve_gptq(SolverInput(problem.weight_NK, problem.scheme, torch.float32))
    with pytest.raises(DataError, match="not finite"):
        solve_gptq(SolverInput(problem.weight_NK, problem.scheme, torch.float32, torch.full((64, 64), torch.inf)))


def test_huge_channel_stays_finite_in_float16() -> None:
    problem = given_input(w4a16(32))
    problem.weight_NK[0] *= 6e4
    solution = solve_gptq(SolverInput(problem.weight_NK, problem.scheme, torch.float16, problem.hessian_KK))
    assert torch.isfinite(solution.scale_NG).all()
    assert torch.isfinite(decode(solution.q_NK, solution.scale_NG)).all()
