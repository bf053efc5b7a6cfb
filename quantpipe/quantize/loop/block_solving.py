"""Quantizing one block while its calibration batches pass through it, and what is handed on to the next.

Shapes: S sequences, L tokens per sequence, D hidden size, T tokens, K in_features.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from quantpipe.formats.layout import quantize_activations
from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.kv_int8 import KVObserver
from quantpipe.quantize.loop.collecting import MAX_STATISTICS_BYTES, collect_at_once, collect_group, passes
from quantpipe.quantize.loop.solving import Solved, solve_together
from quantpipe.quantize.model.block_runs import FULL, QUANTIZED, HiddenStates, StoredBatches, run_block
from quantpipe.quantize.model.groups import find_groups
from quantpipe.quantize.model.suspended import MAX_SUSPENDED_BYTES, SuspendedRuns
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import Solver, SolverOptions, Statistics
from quantpipe.quantize.transforms.transform import Transform


@dataclass(frozen=True)
class Method:
    """How every block is treated: ``transforms`` in their order, then ``solver``.

    ``reads_data``: the solver is given statistics. ``sequential``: those of linears whose inputs are already changed by
    the quantized linears before them in their block. ``propagate``: the next block is given what the quantized model
    gives out, what the full-precision one does, or both (statistics then also tell how the two differ).
    ``kv`` is shown each block's attention once its linears are quantized; its model is opened with
    ``watched_attention()``.
    """

    transforms: Sequence[Transform]
    solver: Solver
    options: SolverOptions = SolverOptions()  # noqa: RUF009 - frozen
    reads_data: bool = False
    sequential: bool = True
    propagate: Literal["quantized", "full", "both"] = "quantized"
    kv: KVObserver | None = None

    @property
    def runs_blocks(self) -> bool:
        """Whether anything looks at what the blocks compute: plain rounding needs no pass over the data."""
        return bool(self.reads_data or self.transforms or self.kv is not None)


@dataclass(frozen=True)
class Block:
    """One block at work: its float32 copy, its targets by their names in it, and what it is run on (None: no data)."""

    name: str
    module: nn.Module
    linears: Mapping[str, nn.Linear]
    schemes: Mapping[str, WeightScheme]
    scale_dtypes: Mapping[str, torch.dtype]
    batches: StoredBatches | None

    def solve(self, names: Sequence[str], method: Method, statistics: Statistics | None) -> dict[str, Solved]:
        """Quantize linears that read the same input. Their weights are left as they are.

        An expert that no token was routed to is rounded to nearest, whatever the solver: its record shows no tokens.
        """
        linears = {name: self.linears[name] for name in names}
        solver, options = method.solver, method.options
        if self.batches is not None and method.reads_data and (statistics is None or not statistics.num_tokens):
            solver, options, statistics = solve_rtn, SolverOptions(scales="absmax"), None
        return solve_together(linears, self.schemes, self.scale_dtypes, solver, options, statistics)

    def write(self, solved: Mapping[str, Solved]) -> None:
        """Give the linears the weights that their integers stand for."""
        for name, each in solved.items():
            self.linears[name].weight.copy_(each.weight.dequantized())


def solve_block(
    block: Block,
    method: Method,
    index: int,
    following: HiddenStates | None,
    copy: Callable[[nn.Module], nn.Module],
) -> dict[str, Solved]:
    """Quantize every target of block ``index``, and write what it gives out to ``following`` (None: the last block).

    ``copy`` makes a float32 copy of a block. Afterwards the block's linears hold their quantized weights.
    """
    batches = block.batches
    if batches is None:
        return _solve_each(block, method)
    if method.propagate == "full" and following is not None:
        for number, batch in enumerate(batches):
            following.write(number, {QUANTIZED: run_block(block.module, batch)})
        following = None
    full = copy(block.module) if method.propagate == "both" else None
    _round_inputs(block)
    solved: dict[str, Solved] = {}
    groups: Sequence[Sequence[str]] = []
    if not method.reads_data:
        solved = _solve_each(block, method)
        block.write(solved)
    else:
        groups, unreached = find_groups(block.module, block.linears, batches, block.name)
        for name in unreached:
            solved |= block.solve([name], method, None)
        block.write(solved)
        if not method.sequential:
            solved |= _solve_at_once(block, full, groups, batches, method)
            block.write(solved)
            groups = []
    with ExitStack() as stack:
        if method.kv is not None:
            stack.enter_context(method.kv.observing(index))
        runs, full_runs = stack.enter_context(_suspended(block, full, groups, batches))
        for number, names in enumerate(groups):
            width = block.linears[names[0]].in_features
            part = block.solve(names, method, collect_group(runs, full_runs, number, width, batches.num_tokens()))
            block.write(part)
            solved |= part
        if following is not None or method.kv is not None:
            for number in range(len(batches)):
                streams = {QUANTIZED: runs.finish(number)}
                if full_runs is not None:
                    streams[FULL] = full_runs.finish(number)
                if following is not None:
                    following.write(number, streams)
    return {name: solved[name] for name in block.linears}


def fake_quantize_input(module: nn.Module, args: tuple[Tensor, ...], divisor: float = 127.0) -> tuple[Tensor, ...]:
    """A forward pre-hook: round a linear's input to the 8-bit grid it is served with."""
    x = args[0]
    q_TK, scale_T1 = quantize_activations(x.reshape(-1, x.shape[-1]), divisor)
    return ((q_TK.float() * scale_T1).reshape(x.shape).to(x.dtype), *args[1:])


def _round_inputs(block: Block) -> None:
    for name, scheme in block.schemes.items():
        if scheme.activation_bits is not None:
            block.linears[name].register_forward_pre_hook(fake_quantize_input)


def _solve_each(block: Block, method: Method) -> dict[str, Solved]:
    return {name: each for leaf in block.linears for name, each in block.solve([leaf], method, None).items()}


def _solve_at_once(
    block: Block, full: nn.Module | None, groups: Sequence[Sequence[str]], batches: StoredBatches, method: Method
) -> dict[str, Solved]:
    """Quantize all groups on what they read in the block as it stands, as many to a pass as memory allows."""
    solved: dict[str, Solved] = {}
    for part in passes(groups, block.linears, MAX_STATISTICS_BYTES):
        widths = [block.linears[names[0]].in_features for names in part]
        with _suspended(block, full, part, batches) as (runs, full_runs):
            statistics = collect_at_once(runs, full_runs, widths, batches.num_tokens())
        for names in part:
            solved |= block.solve(names, method, statistics.pop(0))
    return solved


@contextmanager
def _suspended(
    block: Block, full: nn.Module | None, groups: Sequence[Sequence[str]], batches: StoredBatches
) -> Iterator[tuple[SuspendedRuns, SuspendedRuns | None]]:
    """Passes through the block that stop at ``groups``, and such through its full-precision copy, if there is one."""
    max_bytes = MAX_SUSPENDED_BYTES if full is None else MAX_SUSPENDED_BYTES // 2
    with ExitStack() as stack:
        runs = stack.enter_context(SuspendedRuns(block.module, block.linears, groups, batches, max_bytes))
        if full is None:
            yield runs, None
            return
        linears = {name: full.get_submodule(name) for name in block.linears}
        beside = replace(batches, stream=FULL)
        yield runs, stack.enter_context(SuspendedRuns(full, linears, groups, beside, max_bytes, is_watched=False))
