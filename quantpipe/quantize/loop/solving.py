"""Solving the linears that read one tensor: their rows stacked into one matrix, the result split and recorded again.

Shapes: N out_features, K in_features.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.loop.records import LayerRecord
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import (
    RowErrors,
    Solution,
    Solver,
    SolverInput,
    SolverOptions,
    Statistics,
    row_energy,
)


@dataclass(frozen=True)
class Solved:
    """One linear, quantized, and what that came to."""

    weight: QuantWeight
    record: LayerRecord


def solve_together(
    linears: Mapping[str, nn.Linear],
    schemes: Mapping[str, WeightScheme],
    scale_dtypes: Mapping[str, torch.dtype],
    solver: Solver,
    options: SolverOptions,
    statistics: Statistics | None,
) -> dict[str, Solved]:
    """Solve linears that read the same input. Rows are independent, so those of one scheme make up one matrix."""
    solved: dict[str, Solved] = {}
    for scheme, scale_dtype in dict.fromkeys((schemes[name], scale_dtypes[name]) for name in linears):
        names = [name for name in linears if (schemes[name], scale_dtypes[name]) == (scheme, scale_dtype)]
        started_s = time.monotonic()
        weight_NK = torch.cat([linears[name].weight for name in names])
        given = SolverInput(weight_NK, scheme, scale_dtype, statistics, options)
        solution = solver(given)
        seconds = (time.monotonic() - started_s) / len(names)
        solved |= _split(names, [linears[name].out_features for name in names], given, solution, seconds)
    return solved


def _split(
    names: Sequence[str], num_rows: Sequence[int], given: SolverInput, solution: Solution, seconds: float
) -> dict[str, Solved]:
    hessian_KK = None if given.statistics is None else given.statistics.hessian_KK
    num_tokens = 0 if given.statistics is None else given.statistics.num_tokens
    errors = solution.errors if solution.errors is not None else _row_errors(given, solution)
    before_N, after_N = errors.nearest_N, errors.solution_N
    energy_N = row_energy(given.weight_NK, hessian_KK)
    solved: dict[str, Solved] = {}
    for name, rows in zip(names, _consecutive(num_rows), strict=True):
        energy = float(energy_N[rows].sum().clamp_min(torch.finfo(torch.float64).tiny))
        record = LayerRecord(
            name=name,
            scheme=given.scheme.label,
            error_before=float(before_N[rows].sum()) / energy,
            error_after=float(after_N[rows].sum()) / energy,
            damp_frac=solution.damp_frac,
            num_rows_nearest=solution.num_rows_nearest,
            num_tokens=num_tokens,
            seconds=seconds,
        )
        zero_NG = None if solution.zero_NG is None else solution.zero_NG[rows].clone()
        weight = QuantWeight(solution.q_NK[rows].clone(), solution.scale_NG[rows].clone(), given.scheme, zero_NG)
        solved[name] = Solved(weight, record)
    return solved


def _row_errors(given: SolverInput, solution: Solution) -> RowErrors:
    hessian_KK = None if given.statistics is None else given.statistics.hessian_KK
    plain = SolverInput(given.weight_NK, given.scheme, given.scale_dtype, None, SolverOptions(scales="absmax"))
    found, nearest = (each.dequantized() for each in (solution, solve_rtn(plain)))
    return RowErrors(row_energy(given.weight_NK - found, hessian_KK), row_energy(given.weight_NK - nearest, hessian_KK))


def _consecutive(lengths: Sequence[int]) -> Iterator[slice]:
    start = 0
    for length in lengths:
        yield slice(start, start + length)
        start += length
