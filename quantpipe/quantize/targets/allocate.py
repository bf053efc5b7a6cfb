"""Which linears are stored in more bits, so that a budget is spent where it takes away most divergence.

Knows shapes, schemes and measured sensitivities; runs no model. Sets of linears that runtimes execute as one matrix
(query, key and value; gate and up) are the units, because their members must share a scheme.

Shapes: N out_features, K in_features.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import ceil, floor, prod

import torch

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import WeightScheme


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

    def stored_bits(self, scheme: WeightScheme) -> int:
        """Bits that ``scheme`` takes for these linears, scales and zero points included."""
        return sum(scheme.stored_bits(*shape, 8 * self.scale_dtype.itemsize) for shape in self.shapes.values())


@dataclass(frozen=True)
class Budget:
    """What all quantized weights together may take, scales included: bits per weight on average, or bytes."""

    average_bits: float | None = None
    max_bytes: int | None = None

    def in_bits(self, num_weights: int) -> int:
        """The bits that ``num_weights`` weights may take."""
        if self.max_bytes is not None:
            return 8 * self.max_bytes
        assert self.average_bits is not None
        # Rounded first: binary fractions must not cost the last bit.
        return int(round(self.average_bits * num_weights, 3))


@dataclass(frozen=True)
class SetChoice:
    """What was decided for one set: its sensitivity, the scheme it has now, and what that stores, scales included."""

    modules: tuple[str, ...]
    kl: float
    scheme: str
    bits_per_weight: float
    is_upgraded: bool


@dataclass(frozen=True)
class Allocation:
    """The scheme of every linear that took part, what was decided for each set in model order, and what it takes."""

    schemes: Mapping[str, WeightScheme]
    choices: tuple[SetChoice, ...]
    average_bits: float
    total_bits: int


def allocate(
    sets: Sequence[LinearSet], high: WeightScheme, budget: Budget, fixed: Sequence[LinearSet] = ()
) -> Allocation:
    """Upgrade sets to ``high``, the most divergence taken away per extra bit first, while the budget allows.

    A set that no longer fits is passed over for later, smaller ones. What ``high`` itself costs is taken as zero.
    Sets of equal merit go in order of their names, so the result does not depend on the order of ``sets``. ``fixed``
    sets keep their scheme and count towards the budget. Raises RecipeError, with the legal range, where the budget
    lies below what the present schemes take or above what ``high`` everywhere takes.
    """
    every = [*sets, *fixed]
    extra = [_extra_bits(part, high) for part in sets]
    lowest = sum(part.stored_bits(part.scheme) for part in every)
    num_weights = sum(part.num_weights for part in every)
    limit = budget.in_bits(num_weights)
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
        bits = part.stored_bits(scheme) / part.num_weights
        choices.append(SetChoice(tuple(part.shapes), part.kl, scheme.label, bits, index in upgraded))
    return Allocation(schemes, tuple(choices), taken / num_weights, taken)


def joined(sets: Sequence[LinearSet], together: Set[str]) -> list[LinearSet]:
    """The sets, with all of those whose linears are among ``together`` made one; its ``kl`` is the sum of theirs.

    For linears that readers load by one scheme though they run apart (the experts of a model). Errors of different
    layers add up to about their sum.
    """
    members = [part for part in sets if together & part.shapes.keys()]
    if len(members) < 2:
        return list(sets)
    shapes = {name: shape for part in members for name, shape in part.shapes.items()}
    whole = replace(members[0], shapes=shapes, kl=sum(part.kl for part in members))
    return [whole if part is members[0] else part for part in sets if part is members[0] or part not in members]


def _extra_bits(part: LinearSet, high: WeightScheme) -> int:
    """What upgrading costs. RecipeError where ``high`` does not fit a member, or takes no more room."""
    for name, (_, num_in) in part.shapes.items():
        high.check_fits(name, num_in)
    extra = part.stored_bits(high) - part.stored_bits(part.scheme)
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
        found, legal = f"max_bytes: {budget.max_bytes:,}", f"{-(-lowest // 8):,} to {highest // 8:,} bytes"
    else:
        low, high = lowest / num_weights, highest / num_weights
        # Rounded inwards: what is shown must be legal itself.
        legal = f"{ceil(low * 1000) / 1000} to {floor(high * 1000) / 1000} bits"
        found = f"average_bits: {budget.average_bits}"
    raise RecipeError(f"quantize.allocate.{found} is {direction}; the legal range for this model is {legal}")
