"""Which scales may move between a module and the linears that read what it gives out: observed, then proved.

A pair is a producer (a norm, or a linear) whose output channels may be divided by any positive scale if the consumers'
input columns are multiplied by it. Candidates are found by running the block once; a candidate is used only if random
scales leave the block's output unchanged. No names of models or modules are known here.

Shapes: L tokens, D hidden size, K input columns of the consumers, P output channels of the producer.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quantpipe.quantize.block_runs import Batch, run_block

# Some norms compute in float32 whatever they are given, so a true pair is not exact in float64.
PROOF_TOLERANCE = 1e-5
SCALE_RANGE = (0.5, 1.5)


@dataclass(frozen=True, eq=False)
class ScalePair:
    """A producer, the linears that read it, and which of its channels feeds each of their input columns."""

    producer: str
    consumers: tuple[str, ...]
    channel_of_K: Tensor

    @torch.no_grad()
    def apply(self, block: nn.Module, scale_P: Tensor) -> None:
        """Divide the producer's channels by ``scale_P`` and multiply the consumers' columns by it, in place."""
        for parameter in block.get_submodule(self.producer).parameters(recurse=False):
            parameter.div_(scale_P.reshape(-1, *[1] * (parameter.ndim - 1)))
        for name in self.consumers:
            block.get_parameter(f"{name}.weight").mul_(scale_P[self.channel_of_K])

    def num_channels(self, block: nn.Module) -> int:
        return len(block.get_parameter(f"{self.producer}.weight"))


@dataclass
class _Trace:
    """What one run of a block showed. Every tensor is kept alive, so equal addresses mean the same tensor."""

    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    norms: list[tuple[str, Tensor]] = field(default_factory=list)
    linears: list[tuple[str, Tensor]] = field(default_factory=list)


@torch.no_grad()
def find_pairs(
    block: nn.Module, linears: Mapping[str, nn.Linear], batch: Batch
) -> tuple[list[ScalePair], list[tuple[tuple[str, ...], str]]]:
    """The proved pairs of ``block`` among its ``linears``, and the groups of linears without one, with the reason."""
    exact = copy.deepcopy(block).double()
    probe = batch.first_sequence(torch.float64)
    trace, expected_LD = _trace(exact, linears, probe)
    groups = _readers(trace)
    candidates = {names: list(_candidates(exact, names, x, trace)) for names, x in groups.items()}

    def is_true(*pairs: ScalePair) -> bool:
        return _is_unchanged(exact, probe, expected_LD, pairs)

    likely = [found[0] for found in candidates.values() if found]
    all_true = is_true(*likely)  # one run proves them all where, as usual, none is false
    proved: list[ScalePair] = []
    missing: list[tuple[tuple[str, ...], str]] = []
    for names, found in candidates.items():
        pair = next((pair for pair in found if all_true or is_true(pair)), None)
        if pair is not None:
            proved.append(pair)
        elif found:
            tried = ", ".join(candidate.producer for candidate in found)
            missing.append((names, f"rescaling against {tried} changes the block's output"))
        else:
            missing.append((names, "what it reads is not the output of a norm or linear of the block"))
    return proved, missing


def _trace(block: nn.Module, targets: Mapping[str, nn.Linear], probe: Batch) -> tuple[_Trace, Tensor]:
    """Run ``block`` and note what its linears read and give out and what its norms give out; also its own output."""
    trace = _Trace()
    hooks = []
    for name, module in block.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if name in targets:
            hooks.append(module.register_forward_hook(_noting(trace.linears, name)))
            hooks.append(module.register_forward_pre_hook(_noting_input(trace.inputs, name)))
        elif weight is not None and weight.ndim == 1:
            hooks.append(module.register_forward_hook(_noting(trace.norms, name)))
    output_LD = _contribution(block, probe)
    for hook in hooks:
        hook.remove()
    return trace, output_LD


def _noting(seen: list[tuple[str, Tensor]], name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def note(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((name, output))

    return note


def _noting_input(seen: list[tuple[str, Tensor]], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append((name, args[0]))

    return note


def _readers(trace: _Trace) -> dict[tuple[str, ...], Tensor]:
    """The linears that read each tensor, wherever in the block they run, and the tensor."""
    by_address: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
    for name, x in trace.inputs:
        by_address.setdefault((x.data_ptr(), x.shape[-1]), []).append((name, x))
    return {tuple(name for name, _ in readers): readers[0][1] for readers in by_address.values()}


def _candidates(block: nn.Module, readers: tuple[str, ...], x: Tensor, trace: _Trace) -> Iterator[ScalePair]:
    """Modules that may produce ``x``, the likeliest first: the norm that gave it out, or linears that ran before."""
    width = x.shape[-1]
    for name, output in trace.norms:
        if output.data_ptr() == x.data_ptr() and len(block.get_parameter(f"{name}.weight")) == width:
            yield ScalePair(name, readers, torch.arange(width))
            return
    names = [name for name, _ in trace.linears]
    for name, output in reversed(trace.linears[: names.index(readers[0])]):
        channel_of_K = _channels(x, output)
        if channel_of_K is not None:
            yield ScalePair(name, readers, channel_of_K)


def _channels(x: Tensor, output: Tensor) -> Tensor | None:
    """Which channel of a linear's output feeds each column of ``x``: the same one, or several columns share one.

    Where heads share keys and values, the first token attends to itself alone, so its columns of ``x`` are copies of
    its values: that shows which.
    """
    width, num_channels = x.shape[-1], output.shape[-1]
    if width == num_channels:
        return torch.arange(width)
    if width % num_channels:
        return None
    x_K, output_P = x.reshape(-1, width)[0], output.reshape(-1, num_channels)[0]
    distance_K, channel_of_K = (x_K.unsqueeze(1) - output_P).abs().min(1)
    return channel_of_K if bool((distance_K <= PROOF_TOLERANCE * x_K.abs().max()).all()) else None


def _is_unchanged(block: nn.Module, probe: Batch, expected_LD: Tensor, pairs: Sequence[ScalePair]) -> bool:
    """Whether random scales in ``pairs`` leave the block's output as it was. The block is put back afterwards."""
    generator = torch.Generator().manual_seed(0)
    low, high = SCALE_RANGE
    scales = [
        low + (high - low) * torch.rand(pair.num_channels(block), generator=generator, dtype=torch.float64)
        for pair in pairs
    ]
    for pair, scale_P in zip(pairs, scales, strict=True):
        pair.apply(block, scale_P)
    found_LD = _contribution(block, probe)
    for pair, scale_P in zip(pairs, scales, strict=True):
        pair.apply(block, 1 / scale_P)
    error_L = (found_LD - expected_LD).norm(dim=-1)
    return bool((error_L <= PROOF_TOLERANCE * expected_LD.norm(dim=-1)).all())


def _contribution(block: nn.Module, probe: Batch) -> Tensor:
    """What the block adds to its input, [L, D]: beside a large residual stream, a change of it would not be seen."""
    return (run_block(block, probe) - probe.hidden_SLD)[0]
