"""Proves a private kernel against plain arithmetic before any model runs on it.

Private torch operators may change meaning between releases, and the int8 ones saturate silently on some CPUs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quantpipe.models.weights import LinearWeights


class CpuLinear(Protocol):
    """One or several linears that read the same input, ready to run: float32 [T, K] to float32 [T, N]."""

    weight_bytes: int

    def __call__(self, x_TK: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class KernelCase:
    """Inputs, the right output, and the greatest distance from it that rounding explains."""

    name: str
    weights: LinearWeights
    x_TK: Tensor
    expected_TN: Tensor
    tolerance_TN: Tensor


def find_fault(make_linear: Callable[[LinearWeights], CpuLinear], cases: Iterable[KernelCase]) -> str | None:
    """Why this kernel cannot be used on this machine, or None where every case holds."""
    for case in cases:
        try:
            y_TN = make_linear(case.weights)(case.x_TK)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return f"{case.name}: {str(error).splitlines()[0]}"
        if y_TN.shape != case.expected_TN.shape:
            return f"{case.name}: shape {list(y_TN.shape)} instead of {list(case.expected_TN.shape)}"
        distance_TN = (y_TN.double() - case.expected_TN).abs()
        if not bool((distance_TN <= case.tolerance_TN).all()):  # a NaN is never within tolerance
            worst = distance_TN.max().item() / case.expected_TN.abs().max().item()
            return f"{case.name}: off by up to {worst:.1%} of the largest result"
    return None
