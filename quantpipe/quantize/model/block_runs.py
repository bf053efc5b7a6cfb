"""What decoder blocks are called with: captured from the model once, then replayed block by block from files.

Hidden states lie in files, one for each batch, so that memory holds one batch whatever the number of samples. What else
a block is called with (rope, masks) depends on the block and on the number of sequences only: one copy of each is kept.

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

from quantpipe.errors import RecipeError
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
        rows = slice(number, number + 1)
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
        save_file(copies, self._path(number))

    def _path(self, number: int) -> Path:
        return self.folder / f"batch-{number:05d}.safetensors"


@dataclass(frozen=True)
class BlockKwargs:
    """What each block is called with beside hidden states: number of sequences -> one mapping for each block."""

    of_shape: Mapping[int, Sequence[dict[str, Any]]]
    sequences_of_batch: Sequence[int]
    sequence_length: int

    def of(self, batch: int, block: int) -> dict[str, Any]:
        return self.of_shape[self.sequences_of_batch[batch]][block]


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
    model: StreamedModel, token_ids_SL: npt.NDArray[np.int64], hidden: HiddenStates | None, streams: Sequence[str]
) -> BlockKwargs:
    """Run the model without its blocks, a batch at a time: what enters the first block, and what each is called with.

    The hidden states go into ``hidden`` under the name of every stream; None (when resuming) writes none.
    Raises RecipeError where the model does more between its blocks than hand on the hidden states.
    """
    per_batch = max(1, TOKENS_PER_BATCH // token_ids_SL.shape[1])
    batches = [token_ids_SL[start : start + per_batch] for start in range(0, len(token_ids_SL), per_batch)]
    of_shape: dict[int, list[dict[str, Any]]] = {}
    kept: list[Tensor] = []
    for number, ids_SL in enumerate(batches):
        known = len(ids_SL) in of_shape
        if known and hidden is None:
            continue
        entered_SLD, kwargs = _pass_through(model, ids_SL, stop_at_first=known)
        if not known:
            of_shape[len(ids_SL)] = [_interned(each, kept) for each in kwargs]
        if hidden is not None:
            hidden.write(number, dict.fromkeys(streams, entered_SLD.float()))
    return BlockKwargs(of_shape, [len(ids_SL) for ids_SL in batches], token_ids_SL.shape[1])


def run_block(block: nn.Module, batch: Batch) -> Tensor:
    """The hidden states [S, L, D] that ``block`` gives out."""
    output = block(batch.hidden_SLD, **batch.kwargs)
    hidden_SLD: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_SLD


def _pass_through(
    model: StreamedModel, token_ids_SL: npt.NDArray[np.int64], stop_at_first: bool
) -> tuple[Tensor, list[dict[str, Any]]]:
    """What enters the first block, and the other arguments of every block, with each block handing on its input."""
    entered: list[Tensor] = []
    kwargs: list[dict[str, Any]] = []
    kinds: dict[type, Any] = {}
    blocks = model.blocks.blocks

    def stand_in(index: int, *args: Any, **given: Any) -> Any:
        block = blocks[index]
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        named = dict(zip(names, args, strict=False)) | given
        hidden_SLD = named.pop(names[0])
        if index != len(kwargs) or len(args) > len(names) or (entered and not torch.equal(entered[0], hidden_SLD)):
            raise RecipeError(
                f"model: {type(model.module).__name__} does more between its decoder blocks than hand on the hidden "
                f"states (seen at {model.blocks.name(index)}); this architecture cannot be quantized block by block"
            )
        entered[:] = [hidden_SLD]
        kwargs.append(named)
        if stop_at_first or index + 1 == len(blocks):
            raise StopForwardError
        if type(block) not in kinds:
            one = Batch(hidden_SLD, named).first_sequence(torch.float32)
            kinds[type(block)] = model.load_block(index).float()(one.hidden_SLD, **one.kwargs)
        kind = kinds[type(block)]
        return (hidden_SLD, *kind[1:]) if isinstance(kind, tuple) else hidden_SLD

    with model.replaced([partial(stand_in, index) for index in range(len(blocks))]):
        try:
            # Without use_cache=False a block run again would attend to the keys of its earlier runs.
            model.module(input_ids=torch.from_numpy(token_ids_SL), use_cache=False)
        except StopForwardError:
            return entered[0], kwargs
    raise RecipeError(f"model: {type(model.module).__name__} ran without calling its blocks {model.blocks.path}")


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors, also inside tuples and dicts, in ``dtype``; anything else unchanged."""
    if isinstance(value, dict):
        return {key: _cast_floats(part, dtype) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_cast_floats(part, dtype) for part in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _rows(value: Any, num_sequences: int, rows: slice) -> Any:
    """The part of a block's keyword arguments that belongs to some sequences of a batch."""
    if isinstance(value, dict):
        return {key: _rows(part, num_sequences, rows) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows(part, num_sequences, rows) for part in value)
    # One dimension alone is positions, which all sequences share.
    if isinstance(value, Tensor) and value.ndim > 1 and len(value) == num_sequences:
        return value[rows]
    return value


def _interned(value: Any, kept: list[Tensor]) -> Any:
    """``value`` with every tensor replaced by an equal one of ``kept``, where there is one; else added there."""
    if isinstance(value, dict):
        return {key: _interned(part, kept) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_interned(part, kept) for part in value)
    if not isinstance(value, Tensor):
        return value
    for tensor in kept:
        if tensor is value or (
            (tensor.dtype, tensor.shape, tensor.stride()) == (value.dtype, value.shape, value.stride())
            and torch.equal(tensor, value)
        ):
            return tensor
    kept.append(value)
    return value
