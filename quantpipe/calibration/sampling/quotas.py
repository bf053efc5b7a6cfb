"""How a number of tokens is divided: exactly, by largest remainders. Knows numbers only."""

from collections.abc import Callable, Sequence
from fractions import Fraction

LEAST_TOKENS = 8  # of a part, and of a row that is cut: fewer may be an EOS alone


def cut(sizes: Sequence[int], total: int) -> list[int]:
    """How much is taken of each of the first ``sizes`` so that they give ``total``, or all of them if that is less.

    The last may be cut. Where less than ``LEAST_TOKENS`` were left of it (or than two, of very short ones), an earlier
    one gives what it lacks, and is cut as well.
    """
    taken: list[int] = []
    for size in sizes:
        if total <= 0:
            break
        taken.append(min(size, total))
        total -= size
    if not taken or taken[-1] == sizes[len(taken) - 1]:
        return taken
    for least in (LEAST_TOKENS, 2):
        lacking = min(least, sizes[len(taken) - 1]) - taken[-1]
        if lacking <= 0:
            break
        giver = next((i for i in reversed(range(len(taken) - 1)) if taken[i] - lacking >= least), None)
        if giver is not None:
            taken[giver] -= lacking
            taken[-1] += lacking
            break
    return taken


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


def join_small(amounts: Sequence[int], held: Sequence[int], least: int) -> list[int]:
    """``amounts`` to add to what is ``held``, none below ``least`` to a part that holds nothing.

    They sum to the same: what such a part would get goes to the one that then has most, the first of equal ones.
    """
    joined = list(amounts)
    small = [i for i, amount in enumerate(amounts) if not held[i] and 0 < amount < least]
    if small:
        largest = max(range(len(joined)), key=lambda i: (amounts[i] + held[i], -i))
        for i in small:
            joined[i] = 0
        joined[largest] = amounts[largest] + sum(amounts[i] for i in small if i != largest)
    return joined


class Portions:
    """Divides a total, which may grow, among parts that may run dry; what a dry part lacks goes to the others.

    ``fill(index, amount)`` brings one part up to ``amount`` in all and returns what it came to, less where it ran dry.
    A part with a share of zero gets nothing; one that has nothing gets no less than ``least``, as ``join_small`` says.
    """

    def __init__(self, shares: Sequence[float], fill: Callable[[int, int], int], least: int = 1) -> None:
        self.held = [0] * len(shares)
        self.dry: list[int] = []
        self._shares = shares
        self._fill = fill
        self._least = least

    def grow_to(self, total: int) -> int:
        """Give out until the parts hold ``total``, or all of them are dry; return what they hold."""
        while (left := total - sum(self.held)) > 0:
            wet = [i for i, share in enumerate(self._shares) if share > 0 and i not in self.dry]
            if not wet:
                break
            amounts = divide(left, [self._shares[i] for i in wet])
            amounts = join_small(amounts, [self.held[i] for i in wet], self._least)
            for i, amount in zip(wet, amounts, strict=True):
                wanted = self.held[i] + amount
                self.held[i] = self._fill(i, wanted)
                if self.held[i] < wanted:
                    self.dry.append(i)
        return sum(self.held)
