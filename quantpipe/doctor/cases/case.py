"""One kernel on one small input, and how far from right it may be."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the largest value: half a step of the dtype that a result is rounded to, and float32 sums in another order.
ROUNDING = {torch.float32: 4e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}


@dataclass(frozen=True)
class Case:
    """``run`` gives the error on a device as a multiple of what is allowed: right up to 1, and NaN is wrong."""

    kernel: str
    dtype: torch.dtype
    what: str
    run: Callable[[torch.device], float]

    @property
    def name(self) -> str:
        return f"{self.kernel} {str(self.dtype).removeprefix('torch.')} {self.what}"


def generator(seed: int = 0) -> torch.Generator:
    """Inputs are drawn on the CPU, so that every device gets the same."""
    return torch.Generator().manual_seed(seed)


def error(found: Tensor, expected: Tensor, bound: float) -> float:
    """The largest difference as a multiple of ``bound`` times the largest value expected; NaN where one is."""
    difference = (found.detach().cpu().double() - expected.double()).abs().max()
    return float(difference / (bound * expected.double().abs().max()))


def inequality(found: Tensor, expected: Tensor) -> float:
    """How many values are not exactly as expected, plus 1 where any is not."""
    num_wrong = int((found.detach().cpu() != expected).sum())
    return float(num_wrong + 1) if num_wrong else 0.0


def code_error(found: Tensor, step: Tensor, expected: Tensor, slack: float) -> float:
    """How far codes lie from what they stand for, as a multiple of half a ``step`` plus ``slack`` of the largest."""
    allowed = 0.5 * step.double() + slack * expected.double().abs().max()
    return float(((found.double() - expected.double()).abs() / allowed).max())
