"""How fast this machine reads memory and multiplies matrices, measured with numpy in a fraction of a second.

Products are timed by processor time, so that programs that run beside them do not count.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

READ_BYTES = 192 << 20  # beyond the caches of most machines
NUM_READS = 4
MATRIX_ROWS, MATRIX_SIZE, NUM_PRODUCTS = 512, 1024, 12
CPU_INFO = Path("/proc/cpuinfo")
# What Linux calls instructions that multiply int8 and add up in int32 at once.
DOT_PRODUCT_FEATURES = {"avx512_vnni", "avx_vnni"}


@dataclass(frozen=True)
class HostSpeed:
    """``flops_per_s`` is that of float32 matrix products, of all cores together."""

    bandwidth_bytes_per_s: float
    flops_per_s: float


def measure_host(num_cores: int | None = None) -> HostSpeed:
    """The best of a few tries: what so many cores (all, if None) can do while they do nothing else."""
    num = num_cores or os.cpu_count() or 1
    return HostSpeed(_read_speed(num), num * _multiply_speed())


def has_dot_products(cpu_info: Path = CPU_INFO) -> bool:
    """Whether the CPU multiplies int8 several times as fast as float32; False where it does not tell."""
    try:
        text = cpu_info.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return bool(DOT_PRODUCT_FEATURES & set(text.split()))


def _read_speed(num_threads: int) -> float:
    """Of all threads at once, or of one by its processor time if that is more, as it is on a busy machine."""
    # Ordinary pages, as weights lie in: numpy's own arrays are in huge ones, which are read faster. Written, or every
    # page would be the same one.
    values = np.frombuffer(bytearray(b"\1") * READ_BYTES, dtype=np.int64)
    parts = np.array_split(values, num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        together_s = _best_s(lambda: list(pool.map(np.max, parts)), NUM_READS, time.perf_counter)
    return READ_BYTES / min(together_s, _best_s(lambda: np.max(values), NUM_READS, time.thread_time))


def _multiply_speed() -> float:
    """Of one core."""
    a = np.ones((MATRIX_ROWS, MATRIX_SIZE), dtype=np.float32)
    b = np.ones((MATRIX_SIZE, MATRIX_SIZE), dtype=np.float32)
    best_s = _best_s(lambda: a @ b, NUM_PRODUCTS, time.process_time)  # of all threads that the library uses
    return 2 * MATRIX_ROWS * MATRIX_SIZE**2 / best_s


def _best_s(work: Callable[[], object], num_tries: int, clock: Callable[[], float]) -> float:
    times_s = []
    for _ in range(num_tries):
        started_s = clock()
        work()
        times_s.append(clock() - started_s)
    return min(times_s)
