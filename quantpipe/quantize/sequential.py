"""The block-by-block loop: collect what a block's linears read, solve, write back, propagate to the next block.

Holds one block in float32 and the hidden states of the calibration set; the base model is never changed.

Shapes: S sequences, L tokens per sequence, D hidden size, T tokens, N out_features, K in_features.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.layout import decode, quantize_activations
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.block_runs import Batch, StopForwardError, capture_block_inputs, run_block
from quantpipe.quantize.discover import DecoderBlocks, Targets, shared_input_groups
from quantpipe.quantize.observers import HessianObserver
from quantpipe.quantize.solver import Solution, Solver, SolverInput, output_error
from quantpipe.quantize.transform import Transform, TransformInput, TransformRecord
from quantpipe.report import Progress


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
    """Every quantized linear by its full name, and a record of each.

    ``tensors`` are the tensors that transforms changed beside those weights (norms, biases), by their full names and
    as they are stored; ``transformed`` is what was done to each group of linears.
    """

    weights: Mapping[str, QuantWeight]
    layers: tuple[LayerRecord, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    transformed: tuple[TransformRecord, ...] = ()


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
    transforms: Sequence[Transform] = (),
) -> QuantizedModel:
    """Rewrite every block by ``transforms``, in their order, and quantize every target.

    ``settings`` is None for a solver that reads no data, and ``token_ids_SL`` where no transform reads any either.
    """
    batches = [] if token_ids_SL is None else capture_block_inputs(model, blocks, token_ids_SL)
    weights: dict[str, QuantWeight] = {}
    records: list[LayerRecord] = []
    tensors: dict[str, Tensor] = {}
    transformed: list[TransformRecord] = []
    propagate_quantized = settings is None or settings.propagate_quantized
    for index in progress(range(len(blocks.blocks)), len(blocks.blocks), "blocks quantized"):
        name = blocks.name(index)
        inside = targets.inside(name)
        block = copy.deepcopy(blocks.blocks[index]).float()
        if not propagate_quantized:
            original_outputs = [run_block(block, batch) for batch in batches]
        linears = _linears(block, inside)
        for transform in transforms:
            done = transform(
                TransformInput(block, blocks.blocks[index], linears, batches, dict.fromkeys(linears, scheme))
            )
            transformed += [_with_full_names(record, name) for record in done]
        tensors |= _changed_tensors(blocks.blocks[index], block, name, linears)
        if scheme.activation_bits is not None:
            for linear in linears.values():
                linear.register_forward_pre_hook(fake_quantize_input)
        for leaves in _groups(block, linears, batches):
            hessian_KK = None if settings is None else _collect(block, linears[leaves[0]], batches)
            scale_dtype = inside[leaves[0]].weight.dtype
            group = {leaf: linears[leaf] for leaf in leaves}
            solved = _solve_together(group, scheme, scale_dtype, solver, hessian_KK, settings)
            for leaf, (weight, record) in solved.items():
                weights[f"{name}.{leaf}"] = weight
                records.append(LayerRecord(f"{name}.{leaf}", *record))
                if settings is None or settings.sequential:
                    linears[leaf].weight.copy_(decode(weight.q_NK, weight.scale_NG))
        if not batches or index + 1 == len(blocks.blocks):
            continue
        if propagate_quantized:
            for leaf, linear in linears.items():
                weight = weights[f"{name}.{leaf}"]
                linear.weight.copy_(decode(weight.q_NK, weight.scale_NG))
        for number, batch in enumerate(batches):
            batch.hidden_SLD = run_block(block, batch) if propagate_quantized else original_outputs[number]
    for name in targets.linears.keys() - weights.keys():
        raise DataError(f"{name}: no calibration token reached this layer; calibrate on more tokens, or ignore it")
    return QuantizedModel(weights, tuple(records), tensors, tuple(transformed))


def fake_quantize_input(module: nn.Module, args: tuple[Tensor, ...], divisor: float = 127.0) -> tuple[Tensor, ...]:
    """A forward pre-hook: round a linear's input to the 8-bit grid it is served with."""
    x = args[0]
    q_TK, scale_T1 = quantize_activations(x.reshape(-1, x.shape[-1]), divisor)
    return ((q_TK.float() * scale_T1).reshape(x.shape).to(x.dtype), *args[1:])


def _changed_tensors(
    original: nn.Module, block: nn.Module, name: str, linears: Mapping[str, nn.Linear]
) -> dict[str, Tensor]:
    """Parameters that transforms changed and that are not about to be quantized, by full name and as stored.

    The work copy takes on the stored values, so that what follows is computed with what is going to be read back.
    """
    changed: dict[str, Tensor] = {}
    for leaf, before in original.named_parameters():
        parameter = block.get_parameter(leaf)
        if leaf.removesuffix(".weight") in linears or torch.equal(parameter, before.float()):
            continue
        changed[f"{name}.{leaf}"] = parameter.to(before.dtype, copy=True)
        parameter.copy_(changed[f"{name}.{leaf}"])
    return changed


def _with_full_names(record: TransformRecord, block_name: str) -> TransformRecord:
    linears = tuple(f"{block_name}.{leaf}" for leaf in record.linears)
    producer = None if record.producer is None else f"{block_name}.{record.producer}"
    return replace(record, linears=linears, producer=producer)


def _solve_together(
    group: Mapping[str, nn.Linear],
    scheme: WeightScheme,
    scale_dtype: torch.dtype,
    solver: Solver,
    hessian_KK: Tensor | None,
    settings: SolverSettings | None,
) -> dict[str, tuple[QuantWeight, tuple[float, float, float]]]:
    """Solve linears that read the same input as one matrix (rows are independent), and split the result again."""
    started_s = time.monotonic()
    stacked_NK = torch.cat([linear.weight for linear in group.values()])
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


def _groups(block: nn.Module, linears: Mapping[str, nn.Linear], batches: Sequence[Batch]) -> list[list[str]]:
    """Linears that read the same tensor, in order of execution; one by one where there is no data to observe."""
    if not batches:
        return [[leaf] for leaf in linears]
    seen: list[tuple[str, Tensor]] = []

    def note(leaf: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        # The tensors are kept alive by `seen`, so equal addresses mean the same tensor.
        return lambda _module, args: seen.append((leaf, args[0]))

    # Prepended: the input is looked at before an activation hook replaces it with a tensor of its own.
    hooks = [linear.register_forward_pre_hook(note(leaf), prepend=True) for leaf, linear in linears.items()]
    run_block(block, batches[0].first_sequence(torch.float32))
    for hook in hooks:
        hook.remove()
    return shared_input_groups(seen)


def _collect(block: nn.Module, linear: nn.Linear, batches: Sequence[Batch]) -> Tensor:
    """The mean of x^T x over everything ``linear`` reads, with the block's weights as they now stand."""
    observer = HessianObserver(linear.in_features)

    def observe(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        observer.update(args[0])
        raise StopForwardError

    hook = linear.register_forward_pre_hook(observe)
    for batch in batches:
        try:
            run_block(block, batch)
        except StopForwardError:
            continue
    hook.remove()
    return observer.mean_KK
