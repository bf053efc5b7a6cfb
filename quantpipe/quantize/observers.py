"""Statistics of what a linear reads, accumulated over calibration tokens.

Shapes: T tokens, K in_features.
"""

import torch
from torch import Tensor


class HessianObserver:
    """Running mean of x^T x over tokens, in float32: independent of how the tokens are cut into batches."""

    def __init__(self, in_features: int) -> None:
        self.num_tokens = 0
        self._sum_KK = torch.zeros(in_features, in_features)

    def update(self, x_TK: Tensor) -> None:
        """Add the rows of ``x_TK`` (any leading shape). Padding must not be among them."""
        x_TK = x_TK.reshape(-1, x_TK.shape[-1]).float()
        total = self.num_tokens + x_TK.shape[0]
        # A running mean keeps float32 sums near the size of one token's contribution.
        self._sum_KK.addmm_(x_TK.T, x_TK, beta=self.num_tokens / total, alpha=1.0 / total)
        self.num_tokens = total

    @property
    def mean_KK(self) -> Tensor:
        return self._sum_KK
