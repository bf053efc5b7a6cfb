"""Sequences on their way through a model's blocks, one block after the other; hidden states wait in files.

Shapes: S sequences, L tokens per sequence.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from quantpipe.quantize.model.block_kwargs import BlockKwargs
from quantpipe.quantize.model.block_runs import (
    QUANTIZED,
    HiddenStates,
    Positions,
    StoredBatches,
    capture_block_inputs,
    run_block,
)
from quantpipe.quantize.model.loading import StreamedModel


@dataclass(frozen=True)
class BlockStream:
    """The sequences in ``folder`` before some block; they go through the blocks in order, each once."""

    folder: Path
    kwargs: BlockKwargs

    @classmethod
    def enter(
        cls,
        model: StreamedModel,
        folder: Path,
        token_ids_SL: npt.NDArray[np.int64],
        position_ids_SL: npt.NDArray[np.int64] | None = None,
    ) -> "BlockStream":
        """Sequences before the first block; ``position_ids_SL`` start anew at each document, or None."""
        hidden = _hidden(folder, 0)
        hidden.folder.mkdir(parents=True)
        positions = None
        if position_ids_SL is not None:
            positions = Positions(position_ids_SL, folder / "kwargs")
            positions.folder.mkdir()
        return cls(folder, capture_block_inputs(model, token_ids_SL, hidden, [QUANTIZED], positions))

    @property
    def num_sequences(self) -> int:
        return sum(self.kwargs.sequences_of_batch)

    def batches(self, index: int) -> StoredBatches:
        """What enters block ``index``."""
        return StoredBatches(_hidden(self.folder, index), self.kwargs, index)

    @torch.no_grad()
    def run(self, block: nn.Module, index: int, is_last: bool, ends: Sequence[int], at_end: Callable[[], None]) -> None:
        """Take all sequences through ``block`` (float32), the model's block ``index``.

        ``at_end`` is called whenever the first ``ends`` of them are through. Nothing is kept behind the last block.
        """
        following = _hidden(self.folder, index + 1)
        following.folder.mkdir()
        num_through = 0
        for number, batch in enumerate(self.batches(index)):
            size = len(batch.hidden_SLD)
            cuts = [0, *(end - num_through for end in ends if 0 < end - num_through < size), size]
            outputs = []
            for first, last in pairwise(cuts):
                outputs.append(run_block(block, batch.sequences(slice(first, last), torch.float32)))
                if num_through + last in ends:
                    at_end()
            num_through += size
            if not is_last:
                following.write(number, {QUANTIZED: torch.cat(outputs)})
        shutil.rmtree(_hidden(self.folder, index).folder)


def _hidden(folder: Path, index: int) -> HiddenStates:
    return HiddenStates(folder / f"hidden-{index:05d}")
