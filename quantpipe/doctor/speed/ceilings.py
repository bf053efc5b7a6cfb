"""What this GPU reaches at most: bytes copied per second, and products per second of large matrices (cuBLAS)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quantpipe.doctor.record import Row
from quantpipe.doctor.speed.timer import Timer


@dataclass(frozen=True)
class Ceilings:
    """Measured here and now, not taken from a data sheet. A multiplication and an addition are two operations."""

    bytes_s: float
    bf16_ops_s: float
    int8_ops_s: float

    def least_seconds(self, num_bytes: float, num_ops: float = 0.0, is_int8: bool = False) -> float:
        """The shortest time in which so much can be moved and computed, both at once."""
        return max(num_bytes / self.bytes_s, num_ops / (self.int8_ops_s if is_int8 else self.bf16_ops_s))


def measure_ceilings(
    device: torch.device, timer: Timer, copy_bytes: int = 1 << 30, matrix_size: int = 8192
) -> Ceilings:
    """By a copy within the GPU's memory, and by square products."""
    copy_s = _copy_seconds(device, timer, copy_bytes)
    shape, num_ops = (matrix_size, matrix_size), 2.0 * matrix_size**3
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    bf16_s = timer.seconds(lambda: a @ b.T)
    a8, b8 = (torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for _ in range(2))
    int8_s = timer.seconds(lambda: torch._int_mm(a8, b8.T))
    return Ceilings(2 * copy_bytes / copy_s, num_ops / bf16_s, num_ops / int8_s)


def _copy_seconds(device: torch.device, timer: Timer, copy_bytes: int) -> float:
    source, target = (torch.zeros(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return timer.seconds(lambda: target.copy_(source))


def ceiling_rows(device: torch.device, timer: Timer) -> Iterator[Row]:
    """One row for each."""
    ceilings = measure_ceilings(device, timer)
    yield {"what": "copy of 1 GiB", "reached": round(ceilings.bytes_s * 1e-9, 1), "unit": "GB/s"}
    yield {"what": "bf16 product, 8192 cubed", "reached": round(ceilings.bf16_ops_s * 1e-12, 1), "unit": "TFLOP/s"}
    yield {"what": "int8 product, 8192 cubed", "reached": round(ceilings.int8_ops_s * 1e-12, 1), "unit": "TOP/s"}
