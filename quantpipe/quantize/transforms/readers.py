"""What the linears of a pair read: statistics of each channel, and sample tokens.

Calibration sequences are packed windows of one length and hold no padding, so every token counts.

Shapes: S sequences, L tokens per sequence, T tokens, K input columns, P scaled channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantpipe.quantize.model.block_runs import Batch, run_block
from quantpipe.quantize.transforms.pair_candidates import ScalePair


class InputStatistics:
    """The largest and mean magnitude of each channel, its mean square, and evenly spaced sample tokens.

    Models park enormous values in a few channels of a sequence's first token, which has a scale of its own when served.
    They would hide what the other tokens need, so the first token is not sampled, and it counts in ``absmax_K`` only up
    to the loudest channel of the others. Not at all would be wrong: a channel that only the first token uses would be
    scaled so far down in the weights that its values come out badly, and all later tokens attend to them.
    """

    def __init__(self, in_features: int, tokens_per_sequence: int) -> None:
        self.num_tokens = 0
        self._first_K = torch.zeros(in_features)
        self._others_K = torch.zeros(in_features)
        self._sum_abs_K = torch.zeros(in_features, dtype=torch.float64)
        self._sum_square_K = torch.zeros(in_features, dtype=torch.float64)
        self._tokens_per_sequence = tokens_per_sequence
        self._sample: list[Tensor] = []

    def update(self, x_SLK: Tensor, has_first_tokens: bool = True) -> None:
        """Add inputs; ``has_first_tokens`` False for rows [1, T, K] that a router has picked out of sequences."""
        skipped = 1 if has_first_tokens and x_SLK.shape[1] > 1 else 0
        others_SlK = x_SLK[:, skipped:]
        length = others_SlK.shape[1]
        positions = torch.linspace(0, length - 1, min(length, self._tokens_per_sequence)).round().long()
        self._sample.append(others_SlK[:, positions].flatten(0, 1))
        self._others_K = torch.maximum(self._others_K, others_SlK.abs().amax((0, 1)))
        if skipped:
            self._first_K = torch.maximum(self._first_K, x_SLK[:, 0].abs().amax(0))
        self._sum_abs_K += others_SlK.abs().sum((0, 1))
        self._sum_square_K += others_SlK.square().sum((0, 1))
        self.num_tokens += others_SlK.shape[0] * length

    @property
    def absmax_K(self) -> Tensor:
        return torch.maximum(self._others_K, self._first_K.clamp_max(float(self._others_K.max())))

    @property
    def mean_abs_K(self) -> Tensor:
        return (self._sum_abs_K / self.num_tokens).float()

    @property
    def mean_square_K(self) -> Tensor:
        return (self._sum_square_K / self.num_tokens).float()

    @property
    def sample_TK(self) -> Tensor:
        return torch.cat(self._sample)


@dataclass(frozen=True, eq=False)
class Readers:
    """Linears of a pair that read the very same tensor (one expert's differ from another's), and what they read."""

    names: tuple[str, ...]
    inputs: InputStatistics


@torch.no_grad()
def observe(
    block: nn.Module, pairs: Sequence[ScalePair], batches: Sequence[Batch], sampled_tokens: int
) -> list[list[Readers]]:
    """What the consumers of each pair read, in one pass over ``batches``; those that no token reaches are left out."""
    per_sequence = max(1, sampled_tokens // sum(len(batch.hidden_SLD) for batch in batches))
    found: list[dict[tuple[str, ...], InputStatistics]] = [{} for _ in pairs]
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[0]

        return keep

    names = dict.fromkeys(name for pair in pairs for name in pair.consumers)
    hooks = [block.get_submodule(name).register_forward_pre_hook(note(name)) for name in names]
    try:
        for batch in batches:
            seen.clear()
            run_block(block, batch)
            for pair, statistics in zip(pairs, found, strict=True):
                for readers, x in _same_tensor(pair.consumers, seen):
                    if readers not in statistics:
                        statistics[readers] = InputStatistics(x.shape[-1], per_sequence)
                    sequences, length = batch.hidden_SLD.shape[:2]
                    is_whole = x.numel() == sequences * length * x.shape[-1]
                    statistics[readers].update(
                        x.reshape(sequences if is_whole else 1, -1, x.shape[-1]), has_first_tokens=is_whole
                    )
    finally:
        for hook in hooks:
            hook.remove()
    return [[Readers(names, inputs) for names, inputs in statistics.items()] for statistics in found]


def _same_tensor(consumers: Sequence[str], seen: dict[str, Tensor]) -> list[tuple[tuple[str, ...], Tensor]]:
    groups: dict[int, list[str]] = {}
    for name in consumers:
        if name in seen and seen[name].numel():
            groups.setdefault(seen[name].data_ptr(), []).append(name)
    return [(tuple(names), seen[names[0]]) for names in groups.values()]


def some_sequences(batches: Sequence[Batch], num_tokens: int) -> list[Batch]:
    """Sequences spread evenly over the calibration set, each a batch of its own: about ``num_tokens``, at least one."""
    per_batch, length = batches[0].hidden_SLD.shape[:2]
    total = len(batches) * per_batch
    count = min(total, max(1, num_tokens // length))
    chosen: dict[int, list[int]] = {}
    for position in range(count):
        number, row = divmod(position * total // count, per_batch)
        chosen.setdefault(number, []).append(row)
    found = []
    for number, rows in chosen.items():
        batch = batches[number]
        # the last batch may be smaller
        rows = sorted({min(row, len(batch.hidden_SLD) - 1) for row in rows})
        found += [batch.sequence(row, torch.float32) for row in rows]
    return found


def largest_per_channel(value_K: Tensor, pair: ScalePair) -> Tensor:
    """The maximum [P] over the columns that one channel feeds."""
    return torch.zeros(pair.num_channels).scatter_reduce(0, pair.channel_of_K, value_K, "amax")


def mean_per_channel(value_K: Tensor, pair: ScalePair) -> Tensor:
    """The mean [P] over the columns that one channel feeds."""
    empty_P = torch.zeros(pair.num_channels)
    return empty_P.scatter_reduce(0, pair.channel_of_K, value_K, "mean", include_self=False)
