"""The block-by-block loop: collect what a block's linears read, solve, write back, propagate to the next block.

Holds one block in float32 and the hidden states of the calibration set; the base model is never changed.

Shapes: S sequences, L tokens per sequence, D hidden size, T tokens, N out_features, K in_features.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.layout import decode, quantize_activations
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.discover import DecoderBlocks, Targets, shared_input_groups
from quantpipe.quantize.observers import HessianObserver
from quantpipe.quantize.solver import Solution, Solver, SolverInput, output_error
from quantpipe.report import Progress

# Enough rows for a matrix product to run at full speed, few enough that a block's activations stay small.
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class SolverSettings:
    """How statistics are made for a solver that reads data.

    ``sequential``: a linear sees inputs already changed by the quantized linears before it in its block.
    ``propagate_quantized``: so does the next block.
    """

    damp_frac: float
    sequential: bool
    propagate_quantized: bool


@dataclass(frozen=True)
class LayerRecord:
    """What happened to one linear. ``output_error`` is relative: 0 is lossless, 1 is as bad as all-zero weights."""

    name: str
    output_error: float
    damp_frac: float
    seconds: float


@dataclass(frozen=True)
class QuantizedModel:
    """Every quantized linear by its full name, and a record of each."""

    weights: Mapping[str, QuantWeight]
    layers: tuple[LayerRecord, ...]


@dataclass
class _Batch:
    """Hidden states [S, L, D] of some sequences between two blocks, and what else a block is called with."""

    hidden_SLD: Tensor
    kwargs: dict[str, Any]


class _StopForwardError(Exception):
    """Ends a forward pass once what was wanted has been seen."""


@torch.no_grad()
def quantize_blocks(
    model: nn.Module,
    blocks: DecoderBlocks,
    targets: Targets,
    scheme: WeightScheme,
    solver: Solver,
    settings: SolverSettings | None,
    token_ids_SL: npt.NDArray[np.int64] | None,
    progress: Progress,
) -> QuantizedModel:
    """Quantize every target. ``settings`` and ``token_ids_SL`` are both None for a solver that reads no data."""
    batches = [] if token_ids_SL is None else _capture_block_inputs(model, blocks, token_ids_SL)
    weights: dict[str, QuantWeight] = {}
    records: list[LayerRecord] = []
    for index in progress(range(len(blocks.blocks)), len(blocks.blocks), "blocks quantized"):
        name = blocks.name(index)
        inside = targets.inside(name)
        block = copy.deepcopy(blocks.blocks[index]).float()
        if settings is not None and not settings.propagate_quantized:
            original_outputs = [_run_block(block, batch) for batch in batches]
        linears = _linears(block, inside)
        if scheme.activation_bits is not None:
            for linear in linears.values():
                linear.register_forward_pre_hook(fake_quantize_input)
        for leaves in _groups(block, linears, batches):
            hessian_KK = None if settings is None else _collect(block, linears[leaves[0]], batches)
            solved = _solve_together({leaf: inside[leaf] for leaf in leaves}, scheme, solver, hessian_KK, settings)
            for leaf, (weight, record) in solved.items():
                weights[f"{name}.{leaf}"] = weight
                records.append(LayerRecord(f"{name}.{leaf}", *record))
                if settings is None or settings.sequential:
                    linears[leaf].weight.copy_(decode(weight.q_NK, weight.scale_NG))
        if settings is None or index + 1 == len(blocks.blocks):
            continue
        if settings.propagate_quantized:
            for leaf, linear in linears.items():
                weight = weights[f"{name}.{leaf}"]
                linear.weight.copy_(decode(weight.q_NK, weight.scale_NG))
        for number, batch in enumerate(batches):
            batch.hidden_SLD = _run_block(block, batch) if settings.propagate_quantized else original_outputs[number]
    for name in targets.linears.keys() - weights.keys():
        raise DataError(f"{name}: no calibration token reached this layer; calibrate on more tokens, or ignore it")
    return QuantizedModel(weights, tuple(records))


def fake_quantize_input(module: nn.Module, args: tuple[Tensor, ...], divisor: float = 127.0) -> tuple[Tensor, ...]:
    """A forward pre-hook: round a linear's input to the 8-bit grid it is served with."""
    x = args[0]
    q_TK, scale_T1 = quantize_activations(x.reshape(-1, x.shape[-1]), divisor)
    return ((q_TK.float() * scale_T1).reshape(x.shape).to(x.dtype), *args[1:])


def _solve_together(
    group: Mapping[str, nn.Linear],
    scheme: WeightScheme,
    solver: Solver,
    hessian_KK: Tensor | None,
    settings: SolverSettings | None,
) -> dict[str, tuple[QuantWeight, tuple[float, float, float]]]:
    """Solve linears that read the same input as one matrix (rows are independent), and split the result again."""
    started_s = time.monotonic()
    scale_dtype = next(iter(group.values())).weight.dtype
    stacked_NK = torch.cat([linear.weight.detach().float() for linear in group.values()])
    damp_frac = settings.damp_frac if settings is not None else 0.0
    solution = solver(SolverInput(stacked_NK, scheme, scale_dtype, hessian_KK, damp_frac))
    seconds = (time.monotonic() - started_s) / len(group)
    solved: dict[str, tuple[QuantWeight, tuple[float, float, float]]] = {}
    row = 0
    for leaf, linear in group.items():
        rows = slice(row, row + linear.out_features)
        row = rows.stop
        part = Solution(solution.q_NK[rows].clone(), solution.scale_NG[rows].clone(), solution.damp_frac)
        error = output_error(stacked_NK[rows], part, hessian_KK)
        solved[leaf] = (QuantWeight(part.q_NK, part.scale_NG, scheme), (error, part.damp_frac, seconds))
    return solved


def _linears(block: nn.Module, names: Iterable[str]) -> dict[str, nn.Linear]:
    return {name: module for name in names if isinstance(module := block.get_submodule(name), nn.Linear)}


def _groups(block: nn.Module, linears: Mapping[str, nn.Linear], batches: Sequence[_Batch]) -> list[list[str]]:
    """Linears that read the same tensor, in order of execution; one by one where there is no data to observe."""
    if not batches:
        return [[leaf] for leaf in linears]
    seen: list[tuple[str, Tensor]] = []

    def note(leaf: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        # The tensors are kept alive by `seen`, so equal addresses mean the same tensor.
        return lambda _module, args: seen.append((leaf, args[0]))

    # Prepended: the input is looked at before an activation hook replaces it with a tensor of its own.
    hooks = [linear.register_forward_pre_hook(note(leaf), prepend=True) for leaf, linear in linears.items()]
    probe = _Batch(batches[0].hidden_SLD[:1], _first_sequence(batches[0].kwargs, len(batches[0].hidden_SLD)))
    _run_block(block, probe)
    for hook in hooks:
        hook.remove()
    return shared_input_groups(seen)


def _collect(block: nn.Module, linear: nn.Linear, batches: Sequence[_Batch]) -> Tensor:
    """The mean of x^T x over everything ``linear`` reads, with the block's weights as they now stand."""
    observer = HessianObserver(linear.in_features)

    def observe(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        observer.update(args[0])
        raise _StopForwardError

    hook = linear.register_forward_pre_hook(observe)
    for batch in batches:
        try:
            _run_block(block, batch)
        except _StopForwardError:
            continue
    hook.remove()
    return observer.mean_KK


def _capture_block_inputs(model: nn.Module, blocks: DecoderBlocks, token_ids_SL: npt.NDArray[np.int64]) -> list[_Batch]:
    """Run the model up to its first block, a few sequences at a time, and keep what the block is called with."""
    captured: list[_Batch] = []

    def capture(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        captured.append(_Batch(hidden.float(), {key: _to_float(value) for key, value in kwargs.items()}))
        raise _StopForwardError

    hook = blocks.blocks[0].register_forward_pre_hook(capture, with_kwargs=True)
    sequences_per_batch = max(1, TOKENS_PER_BATCH // token_ids_SL.shape[1])
    for start in range(0, len(token_ids_SL), sequences_per_batch):
        try:
            # Without use_cache=False a block run again would attend to the keys of its earlier runs.
            model(input_ids=torch.from_numpy(token_ids_SL[start : start + sequences_per_batch]), use_cache=False)
        except _StopForwardError:
            continue
    hook.remove()
    return captured


def _run_block(block: nn.Module, batch: _Batch) -> Tensor:
    output = block(batch.hidden_SLD, **batch.kwargs)
    hidden_SLD: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_SLD


def _to_float(value: Any) -> Any:
    """Floating tensors, also inside tuples, in float32; anything else unchanged."""
    if isinstance(value, tuple):
        return tuple(_to_float(part) for part in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value


def _first_sequence(value: Any, num_sequences: int) -> Any:
    """The part of a block's keyword arguments that belongs to the first sequence of a batch."""
    if isinstance(value, dict):
        return {key: _first_sequence(part, num_sequences) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_first_sequence(part, num_sequences) for part in value)
    if isinstance(value, Tensor) and value.ndim > 0 and len(value) == num_sequences:
        return value[:1]
    return value
