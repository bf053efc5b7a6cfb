"""What one run of a block shows about who reads whose output, and which pairs that makes likely. Proves nothing.

A pair is a producer (a norm, or channels of a linear) whose output may be divided by a scale for each channel if the
input columns of everything that reads it are multiplied by it. No names of models or modules are known here.

Shapes: L tokens, T tokens that a module sees, K input columns of the consumers, R output channels of a producer,
P those of them that a pair scales.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantpipe.quantize.model.block_runs import Batch, run_block

# Some norms compute in float32 whatever they are given, so a true pair is not exact in float64.
PROOF_TOLERANCE = 1e-5
SCALE_RANGE = (0.5, 1.5)
# A norm multiplies by its weight, or by one plus its weight.
NORM_OFFSETS = (0.0, 1.0)


@dataclass(frozen=True, eq=False)
class ScalePair:
    """A producer, what reads it, and which channel feeds each input column of the readers.

    ``rows_P`` are the output channels of the producer that are scaled (part of a fused linear's), ``channel_of_K`` the
    index into them of each input column. ``consumers`` are linears about to be quantized; ``followers`` read the same
    tensor but are stored as they are. ``offset`` is what a norm adds to its weight.
    """

    producer: str
    consumers: tuple[str, ...]
    channel_of_K: Tensor
    rows_P: Tensor
    followers: tuple[str, ...] = ()
    offset: float = 0.0

    @property
    def num_channels(self) -> int:
        return len(self.rows_P)

    @torch.no_grad()
    def apply(self, block: nn.Module, scale_P: Tensor) -> None:
        """Divide the producer's channels by ``scale_P`` and multiply the readers' columns by it, in place."""
        for name, parameter in block.get_submodule(self.producer).named_parameters(recurse=False):
            added = self.offset if name == "weight" else 0.0
            divisor = scale_P.reshape(-1, *[1] * (parameter.ndim - 1))
            parameter[self.rows_P] = (parameter[self.rows_P] + added) / divisor - added
        for name in (*self.consumers, *self.followers):
            block.get_parameter(f"{name}.weight").mul_(scale_P[self.channel_of_K])


@dataclass
class Trace:
    """What one run of a block showed, in order. Every tensor is kept alive, so equal addresses mean the same tensor.

    ``reads`` and ``gives``: the input and output of each module with a 2-D weight. ``norms``: the arguments and output
    of each module with a 1-D weight.
    """

    reads: list[tuple[str, Tensor]] = field(default_factory=list)
    gives: list[tuple[str, Tensor]] = field(default_factory=list)
    norms: list[tuple[str, tuple[Any, ...], Tensor]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Group:
    """Linears that read one tensor: targets, others that do too, the tensor, and the norm that gave it out (if any)."""

    targets: tuple[str, ...]
    followers: tuple[str, ...]
    x_TK: Tensor
    norm: str | None


def trace_block(block: nn.Module, probe: Batch) -> tuple[Trace, Tensor]:
    """Run ``block`` and note what its modules read and give out; also what the block adds to its input, [L, D]."""
    trace = Trace()
    hooks = []
    for name, module in block.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.ndim == 2:
            hooks.append(module.register_forward_pre_hook(_noting_input(trace, name)))
        if weight is not None and weight.ndim <= 2:
            hooks.append(module.register_forward_hook(_noting_output(trace, name, weight.ndim)))
    try:
        output_LD = contribution(block, probe)
    finally:
        for hook in hooks:
            hook.remove()
    return trace, output_LD


def contribution(block: nn.Module, probe: Batch) -> Tensor:
    """What the block adds to its input, [L, D]: beside a large residual stream, a change of it would not be seen."""
    return (run_block(block, probe) - probe.hidden_SLD)[0]


def _noting_input(trace: Trace, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # An expert that no token was routed to may still be called, with no rows.
        if args and args[0].numel() and args[0].shape[-1] == module.get_parameter("weight").shape[-1]:
            trace.reads.append((name, args[0].reshape(-1, args[0].shape[-1])))

    return note


def _noting_output(trace: Trace, name: str, ndim: int) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def note(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.numel():
            return
        rows = output.reshape(-1, output.shape[-1])
        if ndim == 1:
            trace.norms.append((name, args, rows))
        else:
            trace.gives.append((name, rows))

    return note


def groups_of(trace: Trace, targets: Mapping[str, nn.Linear]) -> list[Group]:
    """The modules that read each tensor, wherever in the block they run; only groups with a target among them."""
    readers: dict[tuple[str, int, int], dict[str, Tensor]] = {}
    norms: dict[tuple[str, int, int], str] = {}
    for name, x_TK in trace.reads:
        norm = _norm_read(x_TK, trace)
        key = (norm or "", 0 if norm else x_TK.data_ptr(), x_TK.shape[-1])
        readers.setdefault(key, {})[name] = x_TK
        if norm:
            norms[key] = norm
    groups = []
    for key, members in readers.items():
        chosen = tuple(name for name in members if name in targets)
        others = tuple(name for name in members if name not in targets)
        if chosen:
            groups.append(Group(chosen, others, members[chosen[0]], norms.get(key)))
    return groups


def _norm_read(x_TK: Tensor, trace: Trace) -> str | None:
    """The norm whose output ``x_TK`` is, or is rows of, as an expert is given those of its tokens."""
    for name, _, output_LK in trace.norms:
        if output_LK.shape[-1] != x_TK.shape[-1]:
            continue
        if output_LK.data_ptr() == x_TK.data_ptr() or all(
            bool((output_LK == row_K).all(-1).any()) for row_K in (x_TK[0], x_TK[-1])
        ):
            return name
    return None


def norm_candidates(block: nn.Module, group: Group, trace: Trace) -> Iterator[ScalePair]:
    """The group's norm, if its output follows its weight: one number for each channel, with or without one added."""
    name, args, output_LK = next(each for each in trace.norms if each[0] == group.norm)
    every_K = torch.arange(output_LK.shape[-1])
    if len(block.get_parameter(f"{name}.weight")) != len(every_K):
        return
    scale_K = random_scale(len(every_K), torch.Generator().manual_seed(0)).to(output_LK.dtype)
    for offset in NORM_OFFSETS:
        pair = ScalePair(name, group.targets, every_K, every_K, group.followers, offset)
        alone = ScalePair(name, (), every_K, every_K, (), offset)
        alone.apply(block, scale_K)
        found_LK = block.get_submodule(name)(*args).reshape(output_LK.shape) * scale_K
        alone.apply(block, 1 / scale_K)
        if bool((found_LK - output_LK).norm() <= PROOF_TOLERANCE * output_LK.norm()):
            yield pair


def linear_candidates(group: Group, trace: Trace) -> Iterator[ScalePair]:
    """Channels of linears that ran before and may feed what the group reads, the latest linear first."""
    names = [name for name, _ in trace.gives]
    width = group.x_TK.shape[-1]
    for name, output_TR in reversed(trace.gives[: names.index(group.targets[0])]):
        seen: list[Tensor] = []
        for row_of_K in _rows_read(group.x_TK[0], output_TR[0], width):
            if any(torch.equal(row_of_K, other) for other in seen):
                continue
            seen.append(row_of_K)
            is_read_R = torch.zeros(output_TR.shape[-1], dtype=torch.bool)
            is_read_R[row_of_K] = True
            channel_of_K = (is_read_R.cumsum(0) - 1)[row_of_K]
            yield ScalePair(name, group.targets, channel_of_K, is_read_R.nonzero().flatten(), group.followers)


def _rows_read(x_K: Tensor, output_R: Tensor, width: int) -> Iterator[Tensor]:
    """Which output channel of a linear may feed each input column, [K]: seen in the values, or by position.

    The first token attends to itself alone, so what its attention gives out are copies of its values: that shows where
    in a fused output the values lie, and which columns share one because their heads share keys and values.
    """
    copied_K = copies(x_K, output_R)
    if copied_K is not None:
        yield copied_K
    parts, rest = divmod(len(output_R), width)
    if rest == 0:
        every_K = torch.arange(width)
        yield from (part * width + every_K for part in reversed(range(parts)))
        yield from (part + parts * every_K for part in reversed(range(parts)))


def copies(x_K: Tensor, output_R: Tensor) -> Tensor | None:
    """For each column the channel with the same value; None where a column has none."""
    sorted_R, order_R = output_R.sort()
    right_K = torch.searchsorted(sorted_R, x_K).clamp_max(len(sorted_R) - 1)
    left_K = (right_K - 1).clamp_min(0)
    nearest_K = torch.where((sorted_R[left_K] - x_K).abs() < (sorted_R[right_K] - x_K).abs(), left_K, right_K)
    distance_K = (sorted_R[nearest_K] - x_K).abs()
    is_copy = bool((distance_K <= PROOF_TOLERANCE * x_K.abs().max()).all())
    return order_R[nearest_K] if is_copy else None


def random_scale(num_channels: int, generator: torch.Generator) -> Tensor:
    """Scales [P] in float64, drawn evenly from ``SCALE_RANGE``."""
    low, high = SCALE_RANGE
    return low + (high - low) * torch.rand(num_channels, generator=generator, dtype=torch.float64)
