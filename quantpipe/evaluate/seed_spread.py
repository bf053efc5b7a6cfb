"""Whether two ways of making a candidate differ by more than the luck of the seed. Knows numbers, not models.

Each way was run once for each seed and measured on the same texts. Runs of one seed are compared with each other
(paired): where two calibration sets share texts the same seed picks the same ones, so their figures move together, and
where they share none pairing is still right, only wider. What is said holds for the texts measured on; they are fixed,
so the spread is that of the calibration draw alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from quantpipe.errors import DataError
from quantpipe.evaluate.intervals import t_interval

SEED_CONFIDENCE = 0.95


@dataclass(frozen=True)
class SeedSpread:
    """One way's figure on one domain, lower is better: mean over seeds, and standard deviation between seeds."""

    domain: str
    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def deviation(self) -> float:
        """Standard deviation between seeds (n - 1 below the line); NaN for one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class SeedDifference:
    """``first`` minus ``second`` on one domain: the mean over seeds and its interval."""

    domain: str
    first: str
    second: str
    mean: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def better(self) -> str | None:
        """The way with the lower figure, where they differ."""
        if not self.differs:
            return None
        return self.first if self.mean < 0 else self.second

    @property
    def verdict(self) -> str:
        return "differs" if self.differs else "not shown to differ"


def compare_seeds(
    values: Mapping[str, Mapping[str, Sequence[float]]], confidence: float = SEED_CONFIDENCE
) -> tuple[tuple[SeedSpread, ...], tuple[SeedDifference, ...]]:
    """Spreads and pairwise differences of ``values[domain][name]``, one figure for each seed, seeds in one order.

    DataError where fewer than two seeds leave no spread, where names have unequal numbers of seeds, or where a figure
    is not finite.
    """
    spreads, differences = [], []
    for domain, by_name in values.items():
        _check(domain, by_name)
        spreads += [SeedSpread(domain, name, tuple(map(float, figures))) for name, figures in by_name.items()]
        differences += [
            _difference(domain, first, second, by_name[first], by_name[second], confidence)
            for first, second in combinations(by_name, 2)
        ]
    return tuple(spreads), tuple(differences)


def _difference(
    domain: str, first: str, second: str, a: Sequence[float], b: Sequence[float], confidence: float
) -> SeedDifference:
    paired_N = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    low, high = t_interval(paired_N, confidence)
    return SeedDifference(domain, first, second, float(paired_N.mean()), low, high)


def _check(domain: str, by_name: Mapping[str, Sequence[float]]) -> None:
    counts = {len(figures) for figures in by_name.values()}
    if len(counts) > 1:
        raise DataError(f"{domain}: {sorted(counts)} seeds; every set needs the same seeds")
    if counts and min(counts) < 2:
        raise DataError(f"{domain}: {min(counts)} seed leaves no spread to compare with; use at least 2")
    for name, figures in by_name.items():
        if not np.isfinite(figures).all():
            raise DataError(f"{domain}: {name} has a figure that is not finite; look at its run")
