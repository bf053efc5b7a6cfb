"""What every transform is given and gives back: it rewrites a block that quantizes better and computes the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from quantpipe.formats.scheme import WeightScheme
from quantpipe.quantize.model.block_runs import Batch
from quantpipe.quantize.model.loading import StreamedModel


@dataclass(frozen=True)
class TransformInput:
    """One decoder block and what it is called with.

    ``block`` is a float32 work copy, to be changed in place; ``original`` shows the dtypes that parameters are stored
    in. Of ``block``, only the weights of ``linears`` (the targets, by their name in it) are going to be quantized, each
    in its scheme of ``schemes``: any other parameter must end with a value that its stored dtype holds exactly.
    ``batches`` are read from disk when they are indexed, so that only those held on to take memory. ``name`` is the
    block's, for errors.
    """

    block: nn.Module
    original: nn.Module
    linears: Mapping[str, nn.Linear]
    batches: Sequence[Batch]
    schemes: Mapping[str, WeightScheme]
    name: str = "a block"


@dataclass(frozen=True)
class TransformRecord:
    """What a transform did to the linears that read one tensor.

    ``producer`` is the module that was rescaled against them and ``alpha`` the exponent used; both None where the
    group was left as it is, and then ``reason`` says why. ``error_before`` and ``error_after`` are what the transform
    lowered, in its own measure; ``detail`` is anything else worth a line in the report.
    """

    linears: tuple[str, ...]
    producer: str | None
    alpha: float | None
    reason: str | None = None
    error_before: float | None = None
    error_after: float | None = None
    detail: str | None = None


class Transform(Protocol):
    """Rewrites one block in place, its function unchanged."""

    def __call__(self, given: TransformInput) -> list[TransformRecord]: ...


class TransformFactory(Protocol):
    """Makes a transform from its section of the recipe, before anything runs.

    It may change parameters outside the blocks of ``model.module`` in place, or untie them; the loop sees what changed.
    """

    def __call__(self, settings: Any, model: StreamedModel) -> Transform: ...


class TransformCheck(Protocol):
    """Raises RecipeError where the transform of these settings cannot be made for the model, which it leaves alone."""

    def __call__(self, settings: Any, model: StreamedModel) -> None: ...


def per_block(transform: Transform) -> TransformFactory:
    """The factory of a transform that has no settings and leaves everything outside the blocks alone."""
    return lambda _settings, _model: transform
