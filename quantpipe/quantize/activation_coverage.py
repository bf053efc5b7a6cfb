"""Whether a calibration set saw enough: what held-out text does to each layer that calibration did not see, and whether
statistics still move when more sequences are added.

Of the unchanged model, before any transform. Memory holds one block, a batch, and a few numbers for each input channel;
hidden states wait in files.

Shapes: S sequences, L tokens per sequence, T tokens, K in_features.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quantpipe.quantize.channel_ranges import BeyondCounter, BeyondRange, ChannelRange, CurvePoint
from quantpipe.quantize.model.block_stream import BlockStream
from quantpipe.quantize.model.groups import find_groups
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.report import Progress

TokenIds = npt.NDArray[np.int64]

# The shares of the sequences after which statistics are looked at.
FRACTIONS = (0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class InputCoverage:
    """What the ``linears`` of a block that read one tensor are fed. ``role`` is what they are in every block."""

    block: int
    role: str
    linears: tuple[str, ...]
    num_tokens: int
    curve: tuple[CurvePoint, ...]
    held_out: tuple[BeyondRange, ...]


@dataclass(frozen=True)
class ActivationCoverage:
    """Every input of every block. ``domains`` are those of the held-out text; none where there was none.

    ``unreached`` are the linears of experts that no calibration token came to; nothing else is known of these.
    """

    num_sequences: int
    sequence_length: int
    num_blocks: int
    domains: tuple[str, ...]
    inputs: tuple[InputCoverage, ...]
    unreached: tuple[str, ...] = ()

    def beyond_frac(self, index: int) -> float:
        """The share of a held-out domain's values beyond the range, over all inputs; ``index`` into ``domains``."""
        parts = [each.held_out[index] for each in self.inputs]
        return sum(part.num_beyond for part in parts) / max(sum(part.num_values for part in parts), 1)

    def expected_frac(self, index: int) -> float:
        """That share if calibration and held-out values of a channel were drawn alike.

        Of n calibration values and one more, that one is the largest with a chance of 1 / (n + 1).
        """
        parts = [(each.held_out[index].num_values, each.num_tokens) for each in self.inputs]
        expected = sum(num_values / (num_tokens + 1) for num_values, num_tokens in parts)
        return expected / max(sum(num_values for num_values, _ in parts), 1)

    def to_json(self) -> dict[str, Any]:
        """Plain data that JSON holds."""
        return asdict(self)


@torch.no_grad()
def measure_activations(
    model: StreamedModel,
    token_ids_SL: TokenIds,
    position_ids_SL: TokenIds | None,
    held_out: Mapping[str, TokenIds],
    folder: Path,
    progress: Progress,
) -> ActivationCoverage:
    """Run calibration blocks [S, L] and held-out windows of every domain through the model, block by block.

    ``position_ids_SL`` start anew at each document; None: every sequence is one. ``folder`` is for temporary files
    alone: what is in it is removed, and it is gone afterwards.
    """
    num_blocks = len(model.blocks.blocks)
    with _empty_folder(folder):
        calibration = BlockStream.enter(model, folder / "calibration", token_ids_SL, position_ids_SL)
        streams = {
            name: BlockStream.enter(model, folder / f"held-out-{number}", windows_SL, None)
            for number, (name, windows_SL) in enumerate(held_out.items())
        }
        inputs: list[InputCoverage] = []
        unreached: list[str] = []
        for index in progress(range(num_blocks), num_blocks, "blocks observed"):
            found, missing = _measure_block(model, index, calibration, streams)
            inputs += found
            unreached += missing
    num_sequences, sequence_length = token_ids_SL.shape
    return ActivationCoverage(
        num_sequences, sequence_length, num_blocks, tuple(held_out), tuple(inputs), tuple(unreached)
    )


class _Observer(Protocol):
    def update(self, x_TK: Tensor) -> None: ...


def _measure_block(
    model: StreamedModel, index: int, calibration: BlockStream, held_out: Mapping[str, BlockStream]
) -> tuple[list[InputCoverage], list[str]]:
    """What the inputs of one block showed, and its linears that no calibration token reached, by full name."""
    name, is_last = model.blocks.name(index), index + 1 == len(model.blocks.blocks)
    block = model.work_copy(model.load_block(index))
    linears = {leaf: module for leaf, module in block.named_modules() if isinstance(module, nn.Linear)}
    groups, unreached = find_groups(block, linears, calibration.batches(index), name)
    ranges = {group[0]: ChannelRange.empty(linears[group[0]].in_features) for group in groups}
    ends = _ends(calibration.num_sequences)

    def end_part() -> None:
        for each in ranges.values():
            each.end_part()

    with _observing(linears, ranges):
        calibration.run(block, index, is_last, ends, end_part)
    beyond: dict[str, list[BeyondRange]] = {leaf: [] for leaf in ranges}
    for domain, stream in held_out.items():
        counts = {leaf: BeyondCounter(each.absmax_K) for leaf, each in ranges.items()}
        with _observing(linears, counts):
            stream.run(block, index, is_last, (), lambda: None)
        for leaf, each in counts.items():
            beyond[leaf].append(each.finish(domain))
    inputs = [
        InputCoverage(
            index,
            _role(group[0]),
            tuple(group),
            ranges[group[0]].num_tokens,
            ranges[group[0]].curve(ends),
            tuple(beyond[group[0]]),
        )
        for group in groups
    ]
    return inputs, [f"{name}.{leaf}" for leaf in unreached]


def _ends(num_sequences: int) -> list[int]:
    """After how many sequences statistics are looked at."""
    return sorted({max(1, round(fraction * num_sequences)) for fraction in FRACTIONS})


def _role(name: str) -> str:
    """The same for all experts of a block."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@contextmanager
def _observing(linears: Mapping[str, nn.Linear], observers: Mapping[str, _Observer]) -> Iterator[None]:
    """A context in which what some linears read is shown to their observers."""

    def show(observer: _Observer) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, args: observer.update(args[0].reshape(-1, args[0].shape[-1]).float())

    hooks = [linears[name].register_forward_pre_hook(show(observer)) for name, observer in observers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _empty_folder(folder: Path) -> Iterator[None]:
    """``folder`` without what a killed run may have left in it; gone afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder)
