"""Which linears are stored in more bits, so that a budget is spent where it takes away most divergence.

Knows shapes, schemes and measured sensitivities; runs no model. Sets of linears that runtimes execute as one matrix
(query, key and value; gate and up) are the units, because their members must share a scheme.

Shapes: N out_features, K in_features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, prod

import torch

from quantpipe.errors import RecipeError
from quantpipe.formats.artifact_writer import dtype_name
from quantpipe.formats.scheme import TensorSpec, WeightScheme

_BYTES_OF = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "I32": 4, "I64": 8}


@dataclass(frozen=True)
class LinearSet:
    """Linears that share a scheme: name -> (N, K), the scheme they have now, and the dtype of their scales.

    ``kl`` is what storing this set alone in that scheme costs, in nats per token against the full-precision model.
    """

    shapes: Mapping[str, tuple[int, int]]
    scheme: WeightScheme
    scale_dtype: torch.dtype
    kl: float = 0.0

    @property
    def num_weights(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    def stored_bytes(self, scheme: WeightScheme) -> int:
        """Bytes of everything that ``scheme`` stores for these linears, scales included."""
        return sum(
            _num_bytes(spec)
            for num_out, num_in in self.shapes.values()
            for spec in scheme.tensors(num_out, num_in, dtype_name(self.scale_dtype)).values()
        )


@dataclass(frozen=True)
class Budget:
    """What all quantized weights together may take, scales included: bits per weight on average, or bytes."""

    average_bits: float | None = None
    max_bytes: int | None = None

    def in_bytes(self, num_weights: int) -> int:
        """The bytes that ``num_weights`` weights may take."""
        if self.max_bytes is not None:
            return self.max_bytes
        assert self.average_bits is not None
        # Rounded first: 4.5 bits of a million weights must not lose a byte to binary fractions.
        return int(round(self.average_bits * num_weights / 8, 6))


@dataclass(frozen=True)
class SetChoice:
    """What was decided for one set: its sensitivity (None where it was not measured), scheme, and stored bits."""

    modules: tuple[str, ...]
    kl: float | None
    scheme: str
    bits_per_weight: float
    is_upgraded: bool


@dataclass(frozen=True)
class Allocation:
    """The scheme of every linear that took part, what was decided for each set in model order, and what it takes."""

    schemes: Mapping[str, WeightScheme]
    choices: tuple[SetChoice, ...]
    average_bits: float
    num_bytes: int


def allocate(
    sets: Sequence[LinearSet], high: WeightScheme, budget: Budget, fixed: Sequence[LinearSet] = ()
) -> Allocation:
    """Upgrade sets to ``high``, the most divergence taken away per extra byte first, while the budget allows.

    A set that no longer fits is passed over for later, smaller ones. What ``high`` itself costs is taken as zero.
    Sets of equal merit go in order of their names, so the result does not depend on the order of ``sets``. ``fixed``
    sets keep their scheme and count towards the budget. Raises RecipeError, with the legal range, where the budget
    lies below what the present schemes take or above what ``high`` everywhere takes.
    """
    every = [*sets, *fixed]
    extra = [_extra_bytes(part, high) for part in sets]
    lowest = sum(part.stored_bytes(part.scheme) for part in every)
    num_weights = sum(part.num_weights for part in every)
    limit = budget.in_bytes(num_weights)
    _check_range(budget, limit, lowest, lowest + sum(extra), num_weights)
    upgraded: set[int] = set()
    taken = lowest
    for index in sorted(range(len(sets)), key=lambda i: (-sets[i].kl / extra[i], sorted(sets[i].shapes))):
        if taken + extra[index] <= limit:
            upgraded.add(index)
            taken += extra[index]
    schemes: dict[str, WeightScheme] = {}
    choices: list[SetChoice] = []
    for index, part in enumerate(every):
        scheme = high if index in upgraded else part.scheme
        schemes |= dict.fromkeys(part.shapes, scheme)
        bits = 8 * part.stored_bytes(scheme) / part.num_weights
        kl = part.kl if index < len(sets) else None
        choices.append(SetChoice(tuple(part.shapes), kl, scheme.label, bits, index in upgraded))
    return Allocation(schemes, tuple(choices), 8 * taken / num_weights, taken)


def _extra_bytes(part: LinearSet, high: WeightScheme) -> int:
    """What upgrading costs. RecipeError where ``high`` does not fit a member, or takes no more room."""
    for name, (_, num_in) in part.shapes.items():
        high.check_fits(name, num_in)
    extra = part.stored_bytes(high) - part.stored_bytes(part.scheme)
    if extra <= 0:
        raise RecipeError(
            f"quantize.allocate.scheme: {high.label} takes no more room than {part.scheme.label}, which "
            f"{next(iter(part.shapes))} has already; give a scheme with more bits"
        )
    return extra


def _check_range(budget: Budget, limit: int, lowest: int, highest: int, num_weights: int) -> None:
    if lowest <= limit <= highest:
        return
    direction = "too little even with nothing upgraded" if limit < lowest else "more than everything upgraded takes"
    if budget.max_bytes is not None:
        found, legal = f"max_bytes: {budget.max_bytes:,}", f"{lowest:,} to {highest:,} bytes"
    else:
        low, high = 8 * lowest / num_weights, 8 * highest / num_weights
        # Rounded inwards: what is shown must be legal itself.
        legal = f"{ceil(low * 1000) / 1000} to {floor(high * 1000) / 1000} bits"
        found = f"average_bits: {budget.average_bits}"
    raise RecipeError(f"quantize.allocate.{found} is {direction}; the legal range for this model is {legal}")


def _num_bytes(spec: TensorSpec) -> int:
    return _BYTES_OF[spec.dtype] * prod(spec.shape)
