"""How long work takes on a GPU when nothing that it reads is in the cache."""

import statistics
from collections.abc import Callable
from typing import Protocol

import torch

from quantpipe.backends.triton.graphs import GraphRecorder

NUM_RUNS = 10
# What is written in between is at least so much, so that the host has launched the next run before it is due.
_MIN_FLUSH_BYTES = 1 << 28


class Timer(Protocol):
    """Seconds of one run of ``work``, which has the same shapes each time."""

    def seconds(self, work: Callable[[], object]) -> float: ...


class GpuTimer:
    """By CUDA events around a recorded graph, so that the host's launches are no part of it; the median of ten."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(_MIN_FLUSH_BYTES, 4 * cache_bytes), dtype=torch.uint8, device=device)

    def seconds(self, work: Callable[[], object]) -> float:
        def record() -> None:
            work()

        with torch.no_grad():
            replay = GraphRecorder(self._device).record(record)
        pairs = []
        for _ in range(NUM_RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._flush.zero_()
            start.record()
            replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self._device)
        return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) * 1e-3
