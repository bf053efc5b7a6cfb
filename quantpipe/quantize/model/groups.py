"""Which linears of a block read the same tensor, and in which order: they share statistics and are solved together."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from quantpipe.errors import DataError
from quantpipe.quantize.model.block_runs import Batch, run_block
from quantpipe.quantize.model.structure import expert_linears
from quantpipe.quantize.targets.discover import shared_input_groups


def find_groups(
    block: nn.Module, linears: Mapping[str, nn.Linear], batches: Sequence[Batch], block_name: str
) -> tuple[list[list[str]], list[str]]:
    """The linears grouped by the tensor they read, in order of execution, from as few sequences as reach them all.

    Also the linears of experts that no token is routed to. DataError names any other that no sequence reaches.
    """
    traces: list[list[list[str]]] = []
    missing = set(linears)
    for batch in batches:
        for number in range(len(batch.hidden_SLD)):
            groups = _trace(block, linears, batch.sequence(number, torch.float32))
            missing -= {name for group in groups for name in group}
            traces.append(groups)
            if not missing:
                return _merged(traces, list(linears)), []
    unreached = [name for name in linears if name in missing]
    for name in missing - set(expert_linears(block)):
        raise DataError(
            f"{block_name}.{name}: no calibration token reached this layer; calibrate on more tokens, or list it "
            "under quantize.ignore"
        )
    return _merged(traces, [name for name in linears if name not in missing]), unreached


def _trace(block: nn.Module, linears: Mapping[str, nn.Linear], one: Batch) -> list[list[str]]:
    seen: list[tuple[str, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        # The tensors are kept alive by `seen`, so equal addresses mean the same tensor.
        return lambda _module, args: seen.append((name, args[0]))

    # Prepended: the input is looked at before an activation hook replaces it with a tensor of its own.
    hooks = [linear.register_forward_pre_hook(note(name), prepend=True) for name, linear in linears.items()]
    try:
        run_block(block, one)
    finally:
        for hook in hooks:
            hook.remove()
    return shared_input_groups(seen)


def _merged(traces: Sequence[Sequence[Sequence[str]]], order: Sequence[str]) -> list[list[str]]:
    """One order of all groups that agrees with that of each trace, and with ``order`` where they leave it open."""
    if len(traces) == 1:
        return [list(group) for group in traces[0]]
    group_of = {group[0]: list(group) for groups in traces for group in groups}
    before: dict[str, set[str]] = {first: set() for first in group_of}
    for groups in traces:
        for earlier, later in pairwise(groups):
            before[later[0]].add(earlier[0])
    ready = [(order.index(first), first) for first, needed in before.items() if not needed]
    heapq.heapify(ready)
    merged: list[list[str]] = []
    while ready:
        _, first = heapq.heappop(ready)
        merged.append(group_of[first])
        for other, needed in before.items():
            if first in needed:
                needed.remove(first)
                if not needed:
                    heapq.heappush(ready, (order.index(other), other))
    if len(merged) < len(group_of):
        names = ", ".join(first for first, needed in before.items() if needed)
        raise DataError(f"{names} run in an order that differs between sequences; list them under quantize.ignore")
    return merged
