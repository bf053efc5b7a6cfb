"""The greedy choice among logits that are there: what a backend without a fused one gives.

Shapes: R rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor


def most_likely(logits_RV: Tensor) -> Tensor:
    """The lowest id of the largest logits of each row [R]; -1 where the largest is not finite."""
    rows_RV = logits_RV.numpy()
    best_R = rows_RV.argmax(-1)  # the first of equals, and any NaN before all numbers
    usable_R = np.isfinite(rows_RV[np.arange(len(best_R)), best_R])
    return torch.from_numpy(np.where(usable_R, best_R, -1))
