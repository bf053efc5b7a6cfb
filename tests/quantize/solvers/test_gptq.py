from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.errors import DataError
from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.quantize.loop.observers import CrossObserver, HessianObserver
from quantpipe.quantize.solvers.gptq import _inverse_factor, _target, solve_gptq
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import Solution, SolverInput, SolverOptions, Statistics, output_error, row_energy


def given_input(
    scheme: WeightScheme, num_tokens: int = 256, num_in: int = 64, num_out: int = 48, seed: int = 0
) -> SolverInput:
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(num_out, num_in, generator=generator)
    mixing_KK = torch.randn(num_in, num_in, generator=generator) / num_in**0.5
    x_TK = torch.randn(num_tokens, num_in, generator=generator) @ mixing_KK
    observer = HessianObserver(num_in)
    observer.update(x_TK)
    return SolverInput(weight_NK, scheme, torch.bfloat16, Statistics(observer.mean_KK, None, num_tokens))


def hessian_of(problem: SolverInput) -> torch.Tensor:
    assert problem.statistics is not None
    return problem.statistics.hessian_KK


def nearest_of(problem: SolverInput) -> Solution:
    return solve_rtn(replace(problem, options=SolverOptions(scales="absmax")))


SCHEMES = [
    w8a8(),
    w4a16(64),
    *(weight_only(bits, 32, symmetric) for bits in (3, 4, 8) for symmetric in (True, False)),
    weight_only(4, None),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_correlated_inputs_are_quantized_much_better_than_by_rounding(scheme: WeightScheme) -> None:
    problem = given_input(scheme)
    solved, nearest = solve_gptq(problem), nearest_of(problem)
    errors = [output_error(problem.weight_NK, each, hessian_of(problem)) for each in (solved, nearest)]
    assert errors[0] < 0.7 * errors[1]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 80), st.integers(0, 1000))
def test_no_output_channel_is_worse_than_rounding(num_tokens: int, seed: int) -> None:
    problem = given_input(w4a16(32), num_tokens=num_tokens, seed=seed)
    solved, nearest = solve_gptq(problem), nearest_of(problem)

    def error_N(solution: object) -> torch.Tensor:
        decoded_NK = decode(solution.q_NK, solution.scale_NG)  # type: ignore[attr-defined]
        return row_energy(problem.weight_NK - decoded_NK, hessian_of(problem))

    assert (error_N(solved) <= error_N(nearest) * (1 + 1e-6)).all()


def test_singular_hessian_with_duplicate_channels_is_damped_and_finished() -> None:
    x_TK = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    x_TK[:, 1] = x_TK[:, 0]
    observer = HessianObserver(64)
    observer.update(x_TK)
    weight_NK = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    problem = SolverInput(weight_NK, w4a16(32), torch.float16, Statistics(observer.mean_KK, None, 8))
    solution = solve_gptq(problem)
    assert solution.damp_frac > 0
    assert torch.isfinite(solution.dequantized()).all()
    found, nearest = (((weight_NK - s.dequantized()) @ x_TK.T).square().sum() for s in (solution, nearest_of(problem)))
    assert found < nearest


def test_dead_channel_keeps_its_rounded_weights() -> None:
    problem = given_input(w4a16(32))
    hessian_KK = hessian_of(problem).clone()
    hessian_KK[5] = 0
    hessian_KK[:, 5] = 0
    solution = solve_gptq(SolverInput(problem.weight_NK, problem.scheme, torch.float32, Statistics(hessian_KK)))
    decoded_N = decode(solution.q_NK, solution.scale_NG)[:, 5]
    # scales may have shrunk below absmax, so compare only weights inside the representable range
    inside_N = problem.weight_NK[:, 5].abs() < 7 * solution.scale_NG[:, 0]
    assert inside_N.sum() > 10
    assert ((decoded_N - problem.weight_NK[:, 5]).abs() <= 0.51 * solution.scale_NG[:, 0])[inside_N].all()


@pytest.mark.parametrize("num_dead", [1, 16])
def test_dead_channels_beside_small_activations_cost_no_accuracy(num_dead: int) -> None:
    """The share of damping must follow the live channels alone, however small these are."""
    problem = given_input(w4a16(32))
    hessian_KK = hessian_of(problem).clone()
    hessian_KK[:num_dead] = 0
    hessian_KK[:, :num_dead] = 0
    large, small = (
        solve_gptq(replace(problem, statistics=Statistics(hessian_KK * size, None, 256))) for size in (1.0, 2.0**-20)
    )
    assert torch.equal(large.q_NK, small.q_NK)
    assert torch.equal(large.scale_NG, small.scale_NG)


def test_stored_order_of_columns_is_kept() -> None:
    """Act-order visits columns by importance; where nothing is correlated the result is plain rounding, in place."""
    weight_NK = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    hessian_KK = torch.diag(torch.rand(64, generator=torch.Generator().manual_seed(6)) + 0.1)
    solution = solve_gptq(SolverInput(weight_NK, w8a8(), torch.float32, Statistics(hessian_KK)))
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
        solve_gptq(
            SolverInput(problem.weight_NK, problem.scheme, torch.float32, Statistics(torch.full((64, 64), torch.inf)))
        )
    overflown = Statistics(hessian_of(problem), torch.full((64, 64), torch.nan), 256)
    with pytest.raises(DataError, match="not finite"):
        solve_gptq(replace(problem, statistics=overflown))


def test_huge_channel_stays_finite_in_float16() -> None:
    problem = given_input(w4a16(32))
    problem.weight_NK[0] *= 6e4
    solution = solve_gptq(SolverInput(problem.weight_NK, problem.scheme, torch.float16, problem.statistics))
    assert torch.isfinite(solution.scale_NG).all()
    assert torch.isfinite(decode(solution.q_NK, solution.scale_NG)).all()


def both_problem(seed: int, num_tokens: int = 2048) -> tuple[SolverInput, torch.Tensor, torch.Tensor]:
    """A weight, statistics of inputs that differ from the full-precision ones, and fresh inputs of both kinds."""
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(48, 64, generator=generator)
    mixing_KK = torch.randn(64, 64, generator=generator) / 8
    leak_KK = torch.randn(64, 64, generator=generator) / 80

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x_TK = torch.randn(count, 64, generator=generator) @ mixing_KK
        return x_TK, x_TK + x_TK @ leak_KK + 0.02 * torch.randn(count, 64, generator=generator)

    x_TK, full_TK = draw(num_tokens)
    hessian, cross = HessianObserver(64), CrossObserver(64)
    hessian.update(x_TK)
    cross.update(x_TK, full_TK)
    statistics = Statistics(hessian.mean_KK, cross.mean_KK, num_tokens)
    return SolverInput(weight_NK, w4a16(32), torch.float32, statistics), *draw(num_tokens)


def test_known_full_precision_inputs_bring_the_output_nearer_to_theirs_on_fresh_data() -> None:
    problem, x_TK, full_TK = both_problem(seed=0)
    wanted_TN = full_TK @ problem.weight_NK.T

    def error(frac: float) -> float:
        solution = solve_gptq(replace(problem, options=SolverOptions(correction_frac=frac)))
        return float((x_TK @ solution.dequantized().T - wanted_TN).square().mean())

    assert error(1.0) < 0.6 * error(0.25) < 0.6 * error(1e-9)


def test_the_target_is_the_least_squares_fit_of_the_full_precision_output() -> None:
    problem, _, _ = both_problem(seed=1)
    generator = torch.Generator().manual_seed(9)
    x_TK = torch.randn(512, 64, generator=generator)
    full_TK = x_TK + 0.1 * torch.randn(512, 64, generator=generator)
    hessian_KK = x_TK.T @ x_TK / 512
    statistics = Statistics(hessian_KK, (full_TK - x_TK).T @ x_TK / 512, 512)
    exact = replace(problem, statistics=statistics, options=SolverOptions(damp_frac=1e-7, correction_frac=1.0))
    inverse_KK, order_K, _ = _inverse_factor(hessian_KK, 1e-7)
    fitted_KN = torch.linalg.lstsq(x_TK, full_TK @ problem.weight_NK.T).solution
    assert torch.allclose(_target(exact, statistics, inverse_KK, order_K), fitted_KN.T, atol=1e-4)


@pytest.mark.parametrize("size", [7, 64, 700])
def test_the_factor_is_that_of_the_damped_inverse_in_act_order(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x_TK = torch.randn(2 * size, size, generator=generator) * torch.rand(size, generator=generator)
    hessian_KK = x_TK.T @ x_TK / len(x_TK)
    factor_KK, order_K, damp_frac = _inverse_factor(hessian_KK, 0.01)
    assert torch.equal(factor_KK, factor_KK.triu())
    assert (hessian_KK.diagonal()[order_K].diff() <= 0).all()
    damped_KK = hessian_KK.double() + damp_frac * hessian_KK.diagonal().double().mean() * torch.eye(size)
    wanted_KK = torch.linalg.inv(damped_KK)[order_K][:, order_K]
    found_KK = factor_KK.double().T @ factor_KK.double()
    assert torch.allclose(found_KK, wanted_KK, rtol=1e-3, atol=1e-4 * float(wanted_KK.abs().max()))


def test_negative_scales_are_used_where_they_are_allowed_and_help() -> None:
    problem = given_input(w4a16(32))
    plain, signed = (solve_gptq(replace(problem, options=SolverOptions(signed_scales=s))) for s in (False, True))
    assert (plain.scale_NG > 0).all()
    assert (signed.scale_NG < 0).any()
    errors = [output_error(problem.weight_NK, each, hessian_of(problem)) for each in (signed, plain)]
    assert errors[0] < errors[1]


def test_errors_that_a_solution_brings_are_its_own_and_those_of_rounding() -> None:
    problem = given_input(w4a16(32))
    solution = solve_gptq(problem)
    assert solution.errors is not None
    for found_N, each in ((solution.errors.solution_N, solution), (solution.errors.nearest_N, nearest_of(problem))):
        wanted_N = row_energy(problem.weight_NK - each.dequantized(), hessian_of(problem))
        assert torch.allclose(found_N, wanted_N, rtol=1e-4)
