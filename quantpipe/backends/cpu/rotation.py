"""Rope on the CPU: the angles of a step, computed once for all layers that share a rope, applied in place.

Shapes: T tokens of the step, H heads, D head_dim, P pairs of dimensions that turn, R = 2P.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantpipe.models.description import RopeSpec


@dataclass(frozen=True)
class Rotation:
    """x * cos + (x, its halves swapped) * sin, the sign of the first half in ``sin_T1R``."""

    cos_T1R: Tensor
    sin_T1R: Tensor

    @classmethod
    def of(cls, rope: RopeSpec, positions_T: Tensor) -> "Rotation":
        # In float64: a text without end turns far, and distances between far positions must stay what they are.
        angles_TP = positions_T.double().unsqueeze(-1) * torch.tensor(rope.inverse_frequencies, dtype=torch.float64)
        cos_TP, sin_TP = angles_TP.cos().float(), angles_TP.sin().float()
        if rope.attention_scale != 1:
            cos_TP, sin_TP = cos_TP.mul_(rope.attention_scale), sin_TP.mul_(rope.attention_scale)
        return cls(torch.cat((cos_TP, cos_TP), -1).unsqueeze(1), torch.cat((-sin_TP, sin_TP), -1).unsqueeze(1))

    def apply_(self, x_THD: Tensor) -> None:
        """Rotate the first R dimensions of every head in place."""
        num_turned = self.cos_T1R.shape[-1]
        turned_THR = x_THD if num_turned == x_THD.shape[-1] else x_THD[..., :num_turned]
        swapped_THR = turned_THR.roll(num_turned // 2, -1)
        turned_THR.mul_(self.cos_T1R).addcmul_(swapped_THR, self.sin_T1R)
