"""Statistics of what a linear reads, accumulated over calibration tokens.

Shapes: T tokens, K in_features.
"""

import torch
from torch import Tensor

# Rows of x^T x computed by one product: narrow ones waste little below the diagonal, wide ones run at full speed.
MIN_ROWS = 144
MAX_PRODUCTS = 8


class HessianObserver:
    """Running mean of x^T x over tokens, in float32: independent of how the tokens are cut into batches.

    The matrix is symmetric, so only blocks on and above its diagonal are computed: about half the work.
    """

    def __init__(self, in_features: int) -> None:
        self.num_tokens = 0
        self._mean_KK = torch.zeros(in_features, in_features)
        num_rows = max(MIN_ROWS, -(-in_features // MAX_PRODUCTS))
        self._rows = [slice(start, min(start + num_rows, in_features)) for start in range(0, in_features, num_rows)]

    def update(self, x_TK: Tensor) -> None:
        """Add the rows of ``x_TK`` (any leading shape). Padding must not be among them."""
        x_TK = x_TK.reshape(-1, x_TK.shape[-1]).float()
        total = self.num_tokens + len(x_TK)
        if total == 0:
            return
        for rows in self._rows:
            # A running mean keeps float32 sums near the size of one token's contribution.
            self._mean_KK[rows, rows.start :].addmm_(
                x_TK[:, rows].T, x_TK[:, rows.start :], beta=self.num_tokens / total, alpha=1.0 / total
            )
        self.num_tokens = total

    @property
    def mean_KK(self) -> Tensor:
        """The mean of x^T x over all tokens so far [K, K]; not a copy."""
        for rows in self._rows:
            square = self._mean_KK[rows, rows]
            square.copy_(square.triu() + square.triu(1).T)
            self._mean_KK[rows.stop :, rows].copy_(self._mean_KK[rows, rows.stop :].T)
        return self._mean_KK


class CrossObserver:
    """Running mean of (x_full - x)^T x over tokens, in float32: row index from x_full - x, column index from x.

    ``x_full`` is what the same linear reads in the full-precision model for the same tokens.
    """

    def __init__(self, in_features: int) -> None:
        self.num_tokens = 0
        self.mean_KK = torch.zeros(in_features, in_features)

    def update(self, x_TK: Tensor, x_full_TK: Tensor) -> None:
        """Add the rows of two tensors of the same tokens in the same order."""
        x_TK, x_full_TK = (x.reshape(-1, x.shape[-1]).float() for x in (x_TK, x_full_TK))
        total = self.num_tokens + len(x_TK)
        self.mean_KK.addmm_((x_full_TK - x_TK).T, x_TK, beta=self.num_tokens / total, alpha=1.0 / total)
        self.num_tokens = total
