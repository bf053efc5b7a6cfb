"""How requests divide between arms: by weights, the same user always to the same arm. Knows no HTTP."""

import hashlib
import itertools
import math
import random
from dataclasses import dataclass

from quantpipe.errors import RecipeError


@dataclass(frozen=True)
class Split:
    """Each arm's weight, and the ``seed`` of the draws. The share of an arm is its weight of all."""

    weights: tuple[float, ...]
    seed: int = 0

    @classmethod
    def parse(cls, text: str, num_arms: int, seed: int = 0) -> "Split":
        """Of ``90:10``. Raises RecipeError where that says no such thing."""
        where = f"--split: '{text}'"
        parts = text.split(":")
        if len(parts) != num_arms:
            raise RecipeError(f"{where} has {len(parts)} weights; give one for each of {num_arms} arms, such as 90:10")
        try:
            weights = tuple(map(float, parts))
        except ValueError:
            raise RecipeError(f"{where} is not made of numbers; give weights, such as 90:10") from None
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not 0 < sum(weights) < math.inf:
            raise RecipeError(f"{where}: weights are numbers from 0 on, and not all of them 0; such as 90:10")
        return cls(weights, seed)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each arm's share of the requests, 0 to 1."""
        total = math.fsum(self.weights)
        return tuple(weight / total for weight in self.weights)

    def arm_at(self, place: float) -> int:
        """The arm that a number from 0 to 1 (and below it) falls to.

        Where the first of two arms loses weight, some of its places fall to the second, and none the other way.
        """
        ends = list(itertools.accumulate(self.shares))
        index = next((index for index, end in enumerate(ends) if place < end), len(ends) - 1)
        while self.weights[index] == 0:  # rounding: the last place falls to the last arm that gets anything
            index -= 1
        return index

    def arm_of_user(self, user: str) -> int:
        """The arm of a user: the same after a restart, and on other machines, while split and seed are the same."""
        digest = hashlib.sha256(f"{self.seed}\0{user}".encode()).digest()
        return self.arm_at(int.from_bytes(digest[:6], "big") / 2**48)


class Draws:
    """Arms for requests of nobody in particular, in an order that the split's seed decides."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._random = random.Random(split.seed)

    def next(self) -> int:
        """The arm of the next request."""
        return self._split.arm_at(self._random.random())


def whole(num_arms: int) -> Split:
    """Everything to the first arm."""
    return Split((1.0, *[0.0] * (num_arms - 1)))
