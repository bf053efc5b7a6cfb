"""How a number of tokens is divided: exactly, by largest remainders. Knows numbers only."""

from collections.abc import Callable, Sequence
from fractions import Fraction


def divide(total: int, shares: Sequence[float]) -> list[int]:
    """``total`` in whole parts proportional to ``shares``, which are not negative and not all zero.

    Each part is its exact share rounded down or up, and they sum to ``total``: what rounding down leaves goes to the
    largest remainders (Hamilton's method), to the earlier of equal ones. Exact arithmetic, so equal on every machine.
    """
    exact = [Fraction(share) for share in shares]
    whole = sum(exact)
    if whole <= 0 or min(exact) < 0:
        raise ValueError(f"shares {list(shares)} cannot divide anything; allowed: none negative, one above 0")
    ideal = [share * total / whole for share in exact]
    parts = [int(part) for part in ideal]
    by_remainder = sorted(range(len(ideal)), key=lambda i: (parts[i] - ideal[i], i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts


class Portions:
    """Divides a total, which may grow, among parts that may run dry; what a dry part lacks goes to the others.

    ``fill(index, amount)`` brings one part up to ``amount`` in all and returns what it came to, less where it ran dry.
    A part with a share of zero gets nothing.
    """

    def __init__(self, shares: Sequence[float], fill: Callable[[int, int], int]) -> None:
        self.held = [0] * len(shares)
        self.dry: list[int] = []
        self._shares = shares
        self._fill = fill

    def grow_to(self, total: int) -> int:
        """Give out until the parts hold ``total``, or all of them are dry; return what they hold."""
        while (left := total - sum(self.held)) > 0:
            wet = [i for i, share in enumerate(self._shares) if share > 0 and i not in self.dry]
            if not wet:
                break
            for i, amount in zip(wet, divide(left, [self._shares[i] for i in wet]), strict=True):
                wanted = self.held[i] + amount
                self.held[i] = self._fill(i, wanted)
                if self.held[i] < wanted:
                    self.dry.append(i)
        return sum(self.held)
