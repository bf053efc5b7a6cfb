"""What decoder blocks are called with beside hidden states: rope, masks, positions.

Where all sequences have the same positions it depends on the number of sequences only, and one copy of each is kept.
Where documents are packed apart each batch has its own: their tensors lie in a file for each batch, so that memory does
not grow with the number of samples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, equal

from quantpipe.disk import GO_ON, writing

Kwargs = dict[str, Any]


@dataclass(frozen=True)
class BlockKwargs:
    """For each batch the keyword arguments of every block; batches that are called alike share one object."""

    of_batch: Sequence[Sequence[Kwargs]]
    sequences_of_batch: Sequence[int]
    sequence_length: int

    def of(self, batch: int, block: int) -> Kwargs:
        return self.of_batch[batch][block]


@dataclass(frozen=True)
class _InFile:
    """Stands for a tensor of a file."""

    name: str


@dataclass(frozen=True)
class StoredKwargs(Sequence[Kwargs]):
    """One batch's keyword arguments of every block; the tensors are read from a file when a block is asked for."""

    path: Path
    of_block: Sequence[Mapping[str, Any]]

    @classmethod
    def write(cls, path: Path, of_block: Sequence[Kwargs]) -> "StoredKwargs":
        """Store the tensors in ``path``, equal ones once."""
        kept: list[Tensor] = []

        def put(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            shared = interned(value, kept)
            return _InFile(str(next(number for number, tensor in enumerate(kept) if tensor is shared)))

        named = [{key: map_leaves(value, put) for key, value in kwargs.items()} for kwargs in of_block]
        # Copied: safetensors stores no memory twice, and arguments may be views of one tensor.
        tensors = {str(number): tensor.contiguous().clone() for number, tensor in enumerate(kept)}
        with writing(path, GO_ON):
            save_file(tensors, path)
        return cls(path, named)

    def __len__(self) -> int:
        return len(self.of_block)

    @overload
    def __getitem__(self, block: int) -> Kwargs: ...

    @overload
    def __getitem__(self, block: slice) -> list[Kwargs]: ...

    def __getitem__(self, block: int | slice) -> Kwargs | list[Kwargs]:
        if isinstance(block, slice):
            return [self[each] for each in range(len(self))[block]]
        with safe_open(self.path, framework="pt") as file:

            def get(value: Any) -> Any:
                return file.get_tensor(value.name) if isinstance(value, _InFile) else value

            return {key: map_leaves(value, get) for key, value in self.of_block[block].items()}


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with every leaf of its dicts and tuples changed."""
    if isinstance(value, dict):
        return {key: map_leaves(part, change) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map_leaves(part, change) for part in value)
    return change(value)


def tensors_of(kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor in the arguments of a block."""
    found: list[Tensor] = []
    map_leaves(dict(kwargs), lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


def interned(value: Any, kept: list[Tensor]) -> Any:
    """A tensor of ``kept`` that equals ``value`` in every respect, or ``value`` itself, which is then kept too."""
    if not isinstance(value, Tensor):
        return value
    for tensor in kept:
        if tensor is value or (
            (tensor.dtype, tensor.shape, tensor.stride()) == (value.dtype, value.shape, value.stride())
            and equal(tensor, value)
        ):
            return tensor
    kept.append(value)
    return value
