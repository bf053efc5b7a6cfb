"""What calibration showed of each input channel, as it grows with the data, and held-out values beyond it.

Shapes: T tokens, K in_features.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class CurvePoint:
    """How far the statistics of the first ``num_sequences`` are from those of all, relatively: 0 is there already.

    ``absmax_change``: the mean over channels of the largest magnitude. ``hessian_change``: the Hessian's diagonal, that
    is the mean square of each channel, by its norm over channels.
    """

    num_sequences: int
    absmax_change: float
    hessian_change: float


@dataclass(frozen=True)
class BeyondRange:
    """Held-out values of one domain, and those larger than any that their channel had in calibration.

    ``largest_ratio`` is the largest of them all, relative to its channel's calibrated maximum.
    """

    domain: str
    num_values: int
    num_beyond: int
    largest_ratio: float


@dataclass
class ChannelRange:
    """The largest magnitude and the mean square of each channel so far, and at the ends of earlier parts."""

    absmax_K: Tensor
    square_K: Tensor
    num_tokens: int = 0
    earlier: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def empty(cls, width: int) -> "ChannelRange":
        return cls(torch.zeros(width), torch.zeros(width, dtype=torch.float64))

    def update(self, x_TK: Tensor) -> None:
        if len(x_TK):
            self.absmax_K = torch.maximum(self.absmax_K, x_TK.abs().amax(0))
        self.square_K += x_TK.double().square().sum(0)
        self.num_tokens += len(x_TK)

    def end_part(self) -> None:
        self.earlier.append((self.absmax_K.clone(), self.square_K / max(self.num_tokens, 1)))

    def curve(self, ends: Sequence[int]) -> tuple[CurvePoint, ...]:
        last_absmax_K, last_square_K = self.earlier[-1]
        mean, norm = float(last_absmax_K.mean()), float(last_square_K.norm())
        return tuple(
            CurvePoint(
                end,
                float(last_absmax_K.mean() - absmax_K.mean()) / mean if mean else 0.0,
                float((square_K - last_square_K).norm()) / norm if norm else 0.0,
            )
            for end, (absmax_K, square_K) in zip(ends, self.earlier, strict=True)
        )


@dataclass
class BeyondCounter:
    """Counts values beyond the calibrated range of their channel."""

    absmax_K: Tensor
    num_values: int = 0
    num_beyond: int = 0
    largest_ratio: float = 0.0

    def update(self, x_TK: Tensor) -> None:
        if not len(x_TK):
            return
        largest_K = x_TK.abs().amax(0)
        seen_K = self.absmax_K > 0  # a channel that was always zero has no range to be relative to
        if bool(seen_K.any()):
            self.largest_ratio = max(self.largest_ratio, float((largest_K.double() / self.absmax_K)[seen_K].max()))
        self.num_values += x_TK.numel()
        self.num_beyond += int((x_TK.abs() > self.absmax_K).sum())

    def finish(self, domain: str) -> BeyondRange:
        return BeyondRange(domain, self.num_values, self.num_beyond, self.largest_ratio)
