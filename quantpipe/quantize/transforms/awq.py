"""AWQ: scale up the weights of the input channels that matter most, so that rounding hurts them less.

Shapes: T tokens, N out_features, K in_features, P channels of a producer, D width of a module's output.
Source: Lin et al. 2023, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", equations 4
and 5: s = mean|x|^ratio, the ratio searched on a grid. The quantizer in the search is the solvers' own, whose scales
are searched over fractions of the largest weight: that is AWQ's clip search, so there is none here besides.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.quantize.model.block_runs import Batch, run_block
from quantpipe.quantize.solvers.scales import round_weight
from quantpipe.quantize.transforms.pairs import ScalePair, find_pairs
from quantpipe.quantize.transforms.readers import Readers, mean_per_channel, observe, some_sequences
from quantpipe.quantize.transforms.stored_scale import apply_exactly, exact_scale, stored_of
from quantpipe.quantize.transforms.transform import TransformInput, TransformRecord

# Ratios are steps of 1 / GRID_SIZE from 0, which is no scale at all, to just below 1.
GRID_SIZE = 20
# The error is smooth in the ratio: every fourth of the grid, then to either side of the best.
FIRST_STEP = 4
# Tokens that channels are measured on, and those that errors are measured on.
STATISTICS_TOKENS = 4096
SEARCH_TOKENS = 512
# Channels quieter than this fraction of the loudest are treated as if they were this loud.
QUIETEST_FRAC = 1e-4

Error = Callable[[], float]


@dataclass
class _Calls:
    """What a module was called with, and what it gave out, [T, D] in order of the calls."""

    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def apply_awq(given: TransformInput) -> list[TransformRecord]:
    """Rescale every proved pair of the block by the ratio that leaves the least error of the output it leads to.

    That is the output of the smallest module with all the linears that read the tensor: the attention for q, k and v,
    the MLP for gate and up, and of a linear that reads alone its own. Heads that share keys and values share scales.
    Pairs whose linears read 8-bit activations are left as they are, with the reason.
    """
    pairs, missing = find_pairs(given.block, given.linears, given.batches[0])
    records = [TransformRecord(names, None, None, reason) for names, reason in missing]
    eligible = []
    for pair in pairs:
        if any(given.schemes[name].activation_bits is not None for name in pair.consumers):
            records.append(TransformRecord(pair.consumers, None, None, "what it reads is quantized too"))
        else:
            eligible.append(pair)
    sequences = some_sequences(given.batches, STATISTICS_TOKENS)
    few = sequences[:: max(1, STATISTICS_TOKENS // SEARCH_TOKENS)]
    for pair, seen in zip(eligible, observe(given.block, eligible, sequences, SEARCH_TOKENS), strict=True):
        records.append(_rescale(given, pair, seen, few))
    return records


def _rescale(
    given: TransformInput, pair: ScalePair, seen: Sequence[Readers], sequences: Sequence[Batch]
) -> TransformRecord:
    if not seen:
        return TransformRecord(pair.consumers, None, None, "no calibration token reaches it")
    num_tokens = sum(each.inputs.num_tokens for each in seen)
    mean_K = sum((each.inputs.mean_abs_K * (each.inputs.num_tokens / num_tokens) for each in seen), torch.zeros(()))
    mean_P = mean_per_channel(mean_K, pair)
    stored = stored_of(given, pair)
    output_error = _own_error(given, seen[0]) if len(pair.consumers) == 1 else _parent_error(given, pair, sequences)
    scales = {0: torch.ones(pair.num_channels)}
    errors: dict[int, float] = {}

    def error(step: int) -> float:
        if step not in errors:
            scales.setdefault(step, exact_scale(importance_scale(mean_P, step / GRID_SIZE), stored))
            with _rounded(given, seen, scales[step][pair.channel_of_K]):
                errors[step] = output_error()
        return errors[step]

    best = _lowest(error)
    if errors[best] >= errors[0]:
        return TransformRecord(pair.consumers, None, None, "no scale lowers the output error", errors[0], errors[0])
    apply_exactly(given, pair, scales[best])
    return TransformRecord(pair.consumers, pair.producer, best / GRID_SIZE, None, errors[0], errors[best])


def _lowest(error: Callable[[int], float]) -> int:
    """The step of the grid with the least error; among equals the smallest."""
    best = min(range(0, GRID_SIZE, FIRST_STEP), key=error)
    reach = FIRST_STEP // 2
    while reach:
        near = [step for step in (best - reach, best, best + reach) if 0 <= step < GRID_SIZE]
        best = min(near, key=error)
        reach //= 2
    return best


def importance_scale(mean_P: Tensor, ratio: float) -> Tensor:
    """mean|x|^ratio for each channel (equation 5), centred on 1 so that norms keep their size."""
    loud_P = mean_P.clamp_min(float(mean_P.max()) * QUIETEST_FRAC).clamp_min(torch.finfo(torch.float32).tiny)
    log_P = ratio * loud_P.log()
    return (log_P - (log_P.max() + log_P.min()) / 2).exp()


@contextmanager
def _rounded(given: TransformInput, seen: Sequence[Readers], scale_K: Tensor) -> Iterator[None]:
    """A context in which the readers' weights are rounded as they would be under ``scale_K``.

    The scale is taken out again after rounding, so that they still read the unscaled input.
    """
    kept = [(given.linears[name], given.linears[name].weight) for each in seen for name in each.names]
    for each in seen:
        for name in each.names:
            linear, scheme = given.linears[name], given.schemes[name]
            dtype = given.original.get_parameter(f"{name}.weight").dtype
            importance_K = each.inputs.mean_square_K / scale_K.square()
            solution = round_weight(linear.weight * scale_K, scheme, dtype, importance_K)
            linear.weight = nn.Parameter(solution.dequantized().div_(scale_K), requires_grad=False)
    try:
        yield
    finally:
        for linear, weight in kept:
            linear.weight = weight


def _own_error(given: TransformInput, readers: Readers) -> Error:
    """The relative squared error of what one linear gives out for its sample tokens."""
    linear, x_TK = given.linears[readers.names[0]], readers.inputs.sample_TK
    weight_NK = linear.weight
    energy = _energy(x_TK @ weight_NK.T)
    return lambda: _energy(x_TK @ (linear.weight - weight_NK).T) / energy


def _parent_error(given: TransformInput, pair: ScalePair, sequences: Sequence[Batch]) -> Error:
    """The relative squared error of what the smallest module with all of a pair's consumers gives out."""
    parent = given.block.get_submodule(_parent_of(pair.consumers))
    calls = _calls_of(given.block, parent, sequences)
    energy = sum(_energy(_later(output)) for output in calls.output)

    def error() -> float:
        found = [_first(parent(*args, **kwargs)) for args, kwargs in calls.given]
        return sum(_energy(_later(a - b)) for a, b in zip(found, calls.output, strict=True)) / energy

    return error


def _parent_of(names: Sequence[str]) -> str:
    """The name of the smallest module that contains all of several; empty for the block itself."""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def _calls_of(block: nn.Module, module: nn.Module, sequences: Sequence[Batch]) -> _Calls:
    calls = _Calls()

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.given.append((args, kwargs))
        calls.output.append(_first(output))

    hook = module.register_forward_hook(keep, with_kwargs=True)
    try:
        for batch in sequences:
            run_block(block, batch)
    finally:
        hook.remove()
    return calls


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _later(output: Tensor) -> Tensor:
    """Without the first token of each sequence: models park enormous values there, which would outweigh all others."""
    return output[:, 1:] if output.ndim == 3 and output.shape[1] > 1 else output


def _energy(x: Tensor) -> float:
    return max(float(x.square().sum(dtype=torch.float64)), torch.finfo(torch.float64).tiny)
