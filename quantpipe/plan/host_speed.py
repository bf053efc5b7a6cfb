"""How fast this machine reads memory and multiplies matrices, measured with numpy in a fraction of a second."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

READ_BYTES = 192 << 20  # beyond the caches of most machines
MATRIX_ROWS, MATRIX_SIZE = 512, 1024
REPEATS = 5


@dataclass(frozen=True)
class HostSpeed:
    """``flops_per_s`` is that of float32 matrix products on all cores."""

    bandwidth_bytes_per_s: float
    flops_per_s: float


def measure_host() -> HostSpeed:
    """The best of a few tries each: what the machine can do while it does nothing else."""
    num_threads = os.cpu_count() or 1
    with ThreadPoolExecutor(num_threads) as pool:
        return HostSpeed(_read_speed(pool, num_threads), _multiply_speed(pool, num_threads))


def _read_speed(pool: ThreadPoolExecutor, num_threads: int) -> float:
    values = np.ones(READ_BYTES // 8, dtype=np.int64)  # written, or every page would be the same one
    parts = np.array_split(values, num_threads)
    return READ_BYTES / _best_s(lambda: list(pool.map(np.max, parts)))


def _multiply_speed(pool: ThreadPoolExecutor, num_threads: int) -> float:
    """A product for each thread, whether or not the library is told to use one thread itself."""
    a = np.ones((MATRIX_ROWS, MATRIX_SIZE), dtype=np.float32)
    b = np.ones((MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    outputs = [np.empty((MATRIX_ROWS, MATRIX_SIZE), dtype=np.float32) for _ in range(num_threads)]
    best_s = _best_s(lambda: list(pool.map(lambda output: np.matmul(a, b, out=output), outputs)))
    return num_threads * 2 * MATRIX_ROWS * MATRIX_SIZE**2 / best_s


def _best_s(work: Callable[[], object]) -> float:
    times_s = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
