"""Collecting what linears read, over all batches of one block: stopped between its sub-steps, or all in one pass.

Shapes: S sequences, L tokens per sequence, K in_features.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from quantpipe.quantize.loop.observers import CrossObserver, HessianObserver
from quantpipe.quantize.model.suspended import SuspendedRuns
from quantpipe.quantize.solvers.solver import Statistics

# Statistics of several groups collected in one pass may take so much memory together; more groups take another pass.
MAX_STATISTICS_BYTES = 1 << 30


class GroupStatistics:
    """The statistics of the linears that read one tensor.

    With a full-precision stream beside, tokens are compared in pairs: that needs both to bring all of a batch's tokens
    here. An expert is brought different ones, and is solved without such statistics.
    """

    def __init__(self, in_features: int, has_cross: bool) -> None:
        self._hessian = HessianObserver(in_features)
        self._cross = CrossObserver(in_features) if has_cross else None

    def update(self, x: Tensor | None, x_full: Tensor | None, num_tokens: int) -> None:
        """Add what one batch of ``num_tokens`` brought: [..., K], or None where it did not come here."""
        if x is None:
            return
        self._hessian.update(x)
        if self._cross is None:
            return
        if x_full is not None and x.shape == x_full.shape and x.numel() == num_tokens * x.shape[-1]:
            self._cross.update(x, x_full)
        else:
            self._cross = None

    def finish(self) -> Statistics:
        cross_KK = None if self._cross is None else self._cross.mean_KK
        return Statistics(self._hessian.mean_KK, cross_KK, self._hessian.num_tokens)


def collect_group(
    runs: SuspendedRuns, full_runs: SuspendedRuns | None, group: int, in_features: int, num_tokens: Sequence[int]
) -> Statistics:
    """The statistics of one group over all batches, each of which is stopped there and may go on afterwards.

    ``num_tokens`` of each batch; ``full_runs`` stop at the same place of the full-precision block.
    """
    statistics = GroupStatistics(in_features, full_runs is not None)
    for number, tokens in enumerate(num_tokens):
        _advance(runs, full_runs, number, group, tokens, statistics)
    return statistics.finish()


def collect_at_once(
    runs: SuspendedRuns, full_runs: SuspendedRuns | None, in_features: Sequence[int], num_tokens: Sequence[int]
) -> list[Statistics]:
    """The statistics of all groups that ``runs`` stops at, with the block's weights as they are."""
    statistics = [GroupStatistics(width, full_runs is not None) for width in in_features]
    for number, tokens in enumerate(num_tokens):
        for group, each in enumerate(statistics):
            _advance(runs, full_runs, number, group, tokens, each)
        for every in (runs, full_runs):
            if every is not None:
                every.drop(number)
    return [each.finish() for each in statistics]


def passes(
    groups: Sequence[Sequence[str]], linears: Mapping[str, nn.Linear], max_bytes: int
) -> Iterator[list[Sequence[str]]]:
    """Cut ``groups`` into runs of such whose statistics fit into ``max_bytes`` together."""
    part: list[Sequence[str]] = []
    size = 0
    for group in groups:
        num_bytes = 4 * linears[group[0]].in_features ** 2
        if part and size + num_bytes > max_bytes:
            yield part
            part, size = [], 0
        part.append(group)
        size += num_bytes
    yield part


def _advance(
    runs: SuspendedRuns,
    full_runs: SuspendedRuns | None,
    number: int,
    group: int,
    num_tokens: int,
    statistics: GroupStatistics,
) -> None:
    x_full = None if full_runs is None else full_runs.advance(number, group)
    statistics.update(runs.advance(number, group), x_full, num_tokens)
    runs.release(number, group)
    if full_runs is not None:
        full_runs.release(number, group)
