"""What every transform is given and gives back: it rewrites a block that quantizes better and computes the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.block_runs import Batch


@dataclass(frozen=True)
class TransformInput:
    """One decoder block and what it is called with.

    ``block`` is a float32 work copy, to be changed in place; ``original`` shows the dtypes that parameters are stored
    in. Of ``block``, only the weights of ``linears`` (the targets, by their name in it) are going to be quantized: any
    other parameter must end with a value that its stored dtype holds exactly.
    """

    block: nn.Module
    original: nn.Module
    linears: Mapping[str, nn.Linear]
    batches: Sequence[Batch]
    scheme: WeightScheme


@dataclass(frozen=True)
class TransformRecord:
    """What a transform did to the linears that read one tensor.

    ``producer`` is the module that was rescaled against them and ``alpha`` the exponent used; both None where the
    group was left as it is, and then ``reason`` says why.
    """

    linears: tuple[str, ...]
    producer: str | None
    alpha: float | None
    reason: str | None = None


class Transform(Protocol):
    """Rewrites one block in place, its function unchanged."""

    def __call__(self, given: TransformInput) -> list[TransformRecord]: ...
