"""The float32 matmul under every linear of this backend.

Shapes: T rows, N out_features, K in_features.
"""

import torch
from torch import Tensor

# For 2 to 16 rows the library's x @ weight.T takes up to twice the time of weight @ x.T; above that they are alike.
MAX_TRANSPOSED_ROWS = 16


def matmul(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T [T, N], contiguous."""
    if 1 < x_TK.shape[0] <= MAX_TRANSPOSED_ROWS:
        return torch.mm(weight_NK, x_TK.T).T.contiguous()
    return torch.nn.functional.linear(x_TK, weight_NK)
