"""Memory that a backend reserves in full and fills little by little."""

import numpy as np
import torch
from torch import Tensor

_NUMPY_DTYPES = {
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written: a KV pool is sized for the worst case and seldom full.

    ``torch.zeros`` writes every page at once; numpy leaves fresh pages, which read as zero, to the operating system.
    """
    return torch.from_numpy(np.zeros(shape, dtype=_NUMPY_DTYPES[dtype]))
