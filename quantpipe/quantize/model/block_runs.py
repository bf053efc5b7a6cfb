"""What decoder blocks are called with: captured from the model once, then replayed block by block from files.

Hidden states lie in files, one for each batch, so that memory holds one batch whatever the number of samples.

Shapes: S sequences, L tokens per sequence, D hidden size.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quantpipe.disk import GO_ON, writing
from quantpipe.errors import RecipeError
from quantpipe.quantize.model.block_kwargs import BlockKwargs, Kwargs, StoredKwargs, interned, map_leaves
from quantpipe.quantize.model.loading import StreamedModel

# Enough rows for a matrix product to run at full speed, few enough that a block's activations stay small.
TOKENS_PER_BATCH = 4096
# Which hidden states: of the model quantized so far, or of the full-precision one beside it.
QUANTIZED, FULL = "quantized", "full"


@dataclass
class Batch:
    """Hidden states [S, L, D] of some sequences between two blocks, and what else a block is called with."""

    hidden_SLD: Tensor
    kwargs: dict[str, Any]

    def first_sequence(self, dtype: torch.dtype) -> "Batch":
        """One sequence of it, with floating tensors in ``dtype``: enough to see how a block is wired."""
        return self.sequence(0, dtype)

    def sequence(self, number: int, dtype: torch.dtype) -> "Batch":
        """Sequence ``number`` alone, with floating tensors in ``dtype``."""
        return self.sequences(slice(number, number + 1), dtype)

    def sequences(self, rows: slice, dtype: torch.dtype) -> "Batch":
        """Some of its sequences, with floating tensors in ``dtype``."""
        part = _rows(self.kwargs, len(self.hidden_SLD), rows)
        return Batch(self.hidden_SLD[rows].to(dtype), _cast_floats(part, dtype))


class StopForwardError(Exception):
    """Ends a forward pass once what was wanted has been seen."""


@dataclass(frozen=True)
class HiddenStates:
    """A folder with one file of hidden states [S, L, D] (float32) for each batch, of one stream or two."""

    folder: Path

    def read(self, number: int, stream: str = QUANTIZED) -> Tensor:
        """The hidden states of batch ``number``, mapped from the file."""
        with safe_open(self._path(number), framework="pt") as file:
            hidden_SLD: Tensor = file.get_tensor(stream)
            return hidden_SLD

    def write(self, number: int, streams: Mapping[str, Tensor]) -> None:
        """Store one batch. The folder counts only once the checkpoint that follows it is complete."""
        # Copied: two streams start as the same tensor, and safetensors stores no memory twice.
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in streams.items()}
        path = self._path(number)
        with writing(path, GO_ON):
            save_file(copies, path)

    def _path(self, number: int) -> Path:
        return self.folder / f"batch-{number:05d}.safetensors"


@dataclass(frozen=True)
class Positions:
    """The position [S, L] of every token in its document, and a folder for what follows from it in each batch."""

    position_ids_SL: npt.NDArray[np.int64]
    folder: Path


@dataclass(frozen=True)
class StoredBatches(Sequence[Batch]):
    """The batches that enter one block. Each is read when it is indexed."""

    hidden: HiddenStates
    kwargs: BlockKwargs
    block: int
    stream: str = QUANTIZED

    def num_tokens(self) -> list[int]:
        """The tokens of each batch."""
        return [number * self.kwargs.sequence_length for number in self.kwargs.sequences_of_batch]

    def __len__(self) -> int:
        return len(self.kwargs.sequences_of_batch)

    @overload
    def __getitem__(self, number: int) -> Batch: ...

    @overload
    def __getitem__(self, number: slice) -> list[Batch]: ...

    def __getitem__(self, number: int | slice) -> Batch | list[Batch]:
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        number = range(len(self))[number]
        return Batch(self.hidden.read(number, self.stream), self.kwargs.of(number, self.block))


@torch.no_grad()
def capture_block_inputs(
    model: StreamedModel,
    token_ids_SL: npt.NDArray[np.int64],
    hidden: HiddenStates | None,
    streams: Sequence[str],
    positions: Positions | None = None,
) -> BlockKwargs:
    """Run the model without its blocks, a batch at a time: what enters the first block, and what each is called with.

    The hidden states go into ``hidden`` under the name of every stream; None (when resuming) writes none.
    ``positions`` None: every sequence is one document. Raises RecipeError where the model does more between its blocks
    than hand on the hidden states.
    """
    per_batch = max(1, TOKENS_PER_BATCH // token_ids_SL.shape[1])
    parts = [slice(start, start + per_batch) for start in range(0, len(token_ids_SL), per_batch)]
    entrance = Entrance(model)
    of_shape: dict[int, Sequence[Kwargs]] = {}
    of_batch: list[Sequence[Kwargs]] = []
    kept: list[Tensor] = []
    for number, rows in enumerate(parts):
        ids_SL = token_ids_SL[rows]
        given_SL = None if positions is None else positions.position_ids_SL[rows]
        known = of_shape.get(len(ids_SL))
        if known is None or hidden is not None:
            entered_SLD, kwargs = entrance.run(ids_SL, given_SL, stop_at_first=known is not None)
        if hidden is not None:
            hidden.write(number, dict.fromkeys(streams, entered_SLD.float()))
        if positions is not None:
            of_batch.append(StoredKwargs.write(positions.folder / f"batch-{number:05d}.safetensors", kwargs))
            continue
        if known is None:
            known = of_shape[len(ids_SL)] = [map_leaves(each, partial(interned, kept=kept)) for each in kwargs]
        of_batch.append(known)
    return BlockKwargs(of_batch, [len(token_ids_SL[rows]) for rows in parts], token_ids_SL.shape[1])


def run_block(block: nn.Module, batch: Batch) -> Tensor:
    """The hidden states [S, L, D] that ``block`` gives out."""
    output = block(batch.hidden_SLD, **batch.kwargs)
    hidden_SLD: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_SLD


class Entrance:
    """The model without its blocks: what enters the first one, and what each is called with."""

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self._kinds: dict[type, Any] = {}  # what a block of each class gives out, for its form

    @torch.no_grad()
    def run(
        self,
        token_ids_SL: npt.NDArray[np.int64],
        position_ids_SL: npt.NDArray[np.int64] | None = None,
        stop_at_first: bool = False,
    ) -> tuple[Tensor, list[Kwargs]]:
        """The hidden states [S, L, D] that enter, and the other arguments of every block (or only of the first).

        Each block hands on its input. Raises RecipeError where something else comes to the next one.
        """
        model, blocks = self._model, self._model.blocks.blocks
        entered: list[Tensor] = []
        kwargs: list[Kwargs] = []

        def stand_in(index: int, *args: Any, **given: Any) -> Any:
            names = list(inspect.signature(type(blocks[index]).forward).parameters)[1:]
            named = dict(zip(names, args, strict=False)) | given
            hidden_SLD = named.pop(names[0])
            if index != len(kwargs) or len(args) > len(names) or (entered and not torch.equal(entered[0], hidden_SLD)):
                raise RecipeError(
                    f"model: {type(model.module).__name__} does more between its decoder blocks than hand on the "
                    f"hidden states (seen at {model.blocks.name(index)}); this architecture cannot be quantized block "
                    "by block"
                )
            entered[:] = [hidden_SLD]
            kwargs.append(named)
            if stop_at_first or index + 1 == len(blocks):
                raise StopForwardError
            return self._handed_on(index, hidden_SLD, named)

        # Without use_cache=False a block run again would attend to the keys of its earlier runs.
        given: Kwargs = {"input_ids": torch.from_numpy(token_ids_SL), "use_cache": False}
        if position_ids_SL is not None:
            given["position_ids"] = torch.from_numpy(position_ids_SL)
        with model.replaced([partial(stand_in, index) for index in range(len(blocks))]):
            try:
                model.module(**given)
            except StopForwardError:
                return entered[0], kwargs
        raise RecipeError(f"model: {type(model.module).__name__} ran without calling its blocks {model.blocks.path}")

    def _handed_on(self, index: int, hidden_SLD: Tensor, kwargs: Kwargs) -> Any:
        """``hidden_SLD`` in the form in which the block gives out what it computes."""
        kind = type(self._model.blocks.blocks[index])
        if kind not in self._kinds:
            one = Batch(hidden_SLD, kwargs).first_sequence(torch.float32)
            self._kinds[kind] = self._model.load_block(index).float()(one.hidden_SLD, **one.kwargs)
        form = self._kinds[kind]
        return (hidden_SLD, *form[1:]) if isinstance(form, tuple) else hidden_SLD


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors, also inside tuples and dicts, in ``dtype``; anything else unchanged."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(value, cast)


def _rows(value: Any, num_sequences: int, rows: slice) -> Any:
    """The part of a block's keyword arguments that belongs to some sequences of a batch."""

    def cut(leaf: Any) -> Any:
        # One dimension alone is positions, which all sequences share.
        return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim > 1 and len(leaf) == num_sequences else leaf

    return map_leaves(value, cut)
