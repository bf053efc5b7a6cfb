"""One reused buffer for weights that are expanded just before a matmul and dropped after it."""

import torch
from torch import Tensor


class Scratch:
    """Hands out uninitialised matrices over one growing buffer: the latest one handed out is the only valid one."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32)

    def matrix(self, num_rows: int, num_columns: int) -> Tensor:
        """A float32 [num_rows, num_columns] view of the buffer; its content is whatever was left there."""
        size = num_rows * num_columns
        if self._buffer.numel() < size:
            # A buffer that began in inference mode could not be written outside of it, where the head runs.
            with torch.inference_mode(False):
                self._buffer = torch.empty(size, dtype=torch.float32)
        return self._buffer[:size].view(num_rows, num_columns)
