"""Weights in floating point: torch's matrix product, which on a GPU is cuBLAS. No kernel of ours would be faster.

Shapes: T rows, N out_features, K in_features.
"""

import torch
from torch import Tensor


def dense_matmul(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, y_TN: Tensor) -> None:
    """y = x @ weight.T + bias, into ``y_TN``. Summed in float32 and rounded once, to the dtype of ``y_TN``.

    x and the weight have one dtype; ``bias_N`` is float32.
    """
    if bias_N is None and x_TK.dtype == y_TN.dtype:
        torch.matmul(x_TK, weight_NK.T, out=y_TN)
        return
    y_TN.copy_(_float32_product(x_TK, weight_NK) if bias_N is None else _float32_product(x_TK, weight_NK).add_(bias_N))


def _float32_product(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weight.T, not rounded to the dtype of its operands."""
    if x_TK.is_cuda and x_TK.dtype != torch.float32:
        return torch.mm(x_TK, weight_NK.T, out_dtype=torch.float32)
    # On the CPU, where kernels are interpreted, torch has no such product of narrower operands.
    return x_TK.float() @ weight_NK.float().T
