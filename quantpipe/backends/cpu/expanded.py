"""Weight-only linears of any bits, symmetric or not: the weights are expanded for each matmul and dropped after it.

Shapes: T rows, N out_features, n some of them, K in_features, G groups along K, P K / 2.
"""

import torch
from torch import Tensor

from quantpipe.backends.cpu.matmul import matmul
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.models.weights import LinearWeights, num_bytes

# So many weights are expanded at a time: they stay in the cache until they are multiplied, and a head with a large
# vocabulary needs no more scratch memory than a small matrix.
EXPANDED_ELEMENTS = 1 << 20


class ExpandedLinear:
    """Any number of rows: expands the weights to float32 in the scratch buffer, then an ordinary matmul.

    Holds 8-bit weights as they are, and narrower ones two to a byte: column p in the low and column p + K / 2 in the
    high half, so that both halves of a row are written in one run. ``rounds`` rounds what goes in and comes out to
    bfloat16, as the int4 kernel does.
    """

    def __init__(self, weights: LinearWeights, scratch: Scratch, compute_dtype: torch.dtype, rounds: bool) -> None:
        assert weights.scheme is not None and weights.scale_NG is not None, "only quantized weights can be expanded"
        self._in_features = weights.weight_NK.shape[1]
        self._has_pairs = weights.scheme.bits <= 4 and self._in_features % 2 == 0
        self._stored = _in_pairs(weights.weight_NK) if self._has_pairs else weights.weight_NK
        self._scale_NG1 = weights.scale_NG.float().unsqueeze(-1)
        self._zero_NG1 = None if weights.zero_NG is None else weights.zero_NG.float().unsqueeze(-1)
        self._scratch, self._compute_dtype, self._rounds = scratch, compute_dtype, rounds
        zeros = [] if self._zero_NG1 is None else [self._zero_NG1]
        self.weight_bytes = num_bytes([self._stored, self._scale_NG1, *zeros])

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._rounds:
            x_TK = x_TK.to(torch.bfloat16).float()
        num_out, num_rows = self._stored.shape[0], max(1, EXPANDED_ELEMENTS // self._in_features)
        if num_out <= num_rows:
            y_TN = self._product(x_TK, slice(0, num_out))
        else:
            y_TN = torch.empty(x_TK.shape[0], num_out)
            for start in range(0, num_out, num_rows):
                rows = slice(start, start + num_rows)
                y_TN[:, rows] = self._product(x_TK, rows)
        return y_TN.to(torch.bfloat16).float() if self._rounds else y_TN

    def _product(self, x_TK: Tensor, rows: slice) -> Tensor:
        """The output features ``rows``."""
        weight_nK = self._expanded(rows)
        if self._compute_dtype is torch.bfloat16:
            return torch.nn.functional.linear(x_TK.to(torch.bfloat16), weight_nK.to(torch.bfloat16)).float()
        return matmul(x_TK, weight_nK)

    def _expanded(self, rows: slice) -> Tensor:
        stored = self._stored[rows]
        weight_nK = self._scratch.matrix(stored.shape[0], self._in_features)
        if self._has_pairs:
            half = self._in_features // 2
            weight_nK[:, :half] = (stored << 4) >> 4  # arithmetic shifts of int8 keep the sign
            weight_nK[:, half:] = stored >> 4
        else:
            weight_nK.copy_(stored)
        groups_nGg = weight_nK.view(stored.shape[0], self._scale_NG1.shape[1], -1)
        if self._zero_NG1 is not None:
            groups_nGg.sub_(self._zero_NG1[rows])
        groups_nGg.mul_(self._scale_NG1[rows])
        return weight_nK


def _in_pairs(q_NK: Tensor) -> Tensor:
    low_NP, high_NP = q_NK.chunk(2, dim=1)
    return (high_NP << 4) | (low_NP & 15)
