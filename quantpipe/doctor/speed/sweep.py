"""Launches beside those of the table: where one is faster on this GPU, it is printed as a row for ``launch_table.py``.

Shapes: T rows, N out_features, K in_features.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.launch_table import MatmulLaunch
from quantpipe.backends.triton.ops.int8 import int8_matmul_as, pack_int8, quantize_activations
from quantpipe.backends.triton.ops.weight_only import matmul_as
from quantpipe.backends.triton.ops.weight_panels import pack_weights
from quantpipe.doctor.record import Row
from quantpipe.doctor.speed.rooflines import DIVISOR, Shapes
from quantpipe.doctor.speed.timer import Timer
from quantpipe.formats.scheme import w4a16

# A launch has to be this much faster to be worth a row.
WORTH_FRAC = 0.97
# What is varied of an entry; shapes of tiles as well, where there are many rows.
_OUT, _WARPS, _STAGES, _PROGRAMS = (64, 128), (4, 8), (3, 4), (1, 2)

Launch = Callable[[MatmulLaunch], Callable[[], object]]


def candidates(entry: MatmulLaunch) -> list[MatmulLaunch]:
    """The entry itself first, then those around it."""
    varied = [
        dataclasses.replace(entry, block_out=out, num_warps=warps, num_stages=stages, programs_per_processor=programs)
        for out, warps, stages, programs in itertools.product(_OUT, _WARPS, _STAGES, _PROGRAMS)
    ]
    return list(dict.fromkeys([entry, *varied]))


def sweep_rows(device: torch.device, timer: Timer, shapes: Shapes) -> Iterator[Row]:
    """For each kernel and each entry of this architecture: the table's time, the best one, and its row."""
    arch = launch_table.architecture(device)
    for kernel, table, launch_of in (
        ("WEIGHT_ONLY", launch_table.WEIGHT_ONLY, _weight_only),
        ("INT8", launch_table.INT8, _int8),
    ):
        for max_rows, entry in table[arch]:
            rows = min(max_rows, shapes.rows[-1])
            yield _best(kernel, arch, max_rows, entry, rows, timer, launch_of(device, arch, rows, shapes))


def _best(kernel: str, arch: int, max_rows: int, entry: MatmulLaunch, rows: int, timer: Timer, launch: Launch) -> Row:
    times = {}
    for candidate in candidates(entry):
        try:
            times[candidate] = timer.seconds(launch(candidate))
        except Exception:  # too much shared memory, too many registers: not a candidate on this GPU
            if candidate == entry:
                raise
    best = min(times, key=lambda candidate: times[candidate])
    row: Row = {
        "table": f"{kernel}[{arch}]",
        "rows": rows,
        "table us": round(times[entry] * 1e6, 2),
        "best us": round(times[best] * 1e6, 2),
        "entry": "as it is",
    }
    if times[best] < WORTH_FRAC * times[entry]:
        fields = ", ".join(str(value) for value in dataclasses.astuple(best))
        row["entry"] = f"({max_rows}, MatmulLaunch({fields})),"
    return row


def _weight_only(device: torch.device, arch: int, rows: int, shapes: Shapes) -> Launch:
    scheme, (num_out, num_in) = w4a16(128), (2 * shapes.intermediate_size, shapes.hidden_size)
    q_NK = torch.randint(-8, 8, (num_out, num_in), dtype=torch.int8, device=device)
    scale_NG = torch.rand(num_out, num_in // 128, device=device).to(torch.bfloat16)
    weights = pack_weights(q_NK, scale_NG, None, scheme)
    x_TK = torch.randn(rows, num_in, device=device, dtype=shapes.dtype)
    y_TN = torch.empty(rows, num_out, device=device, dtype=shapes.dtype)
    return lambda entry: lambda: matmul_as(entry, arch, x_TK, weights, None, y_TN)


def _int8(device: torch.device, arch: int, rows: int, shapes: Shapes) -> Launch:
    num_out, num_in = 2 * shapes.intermediate_size, shapes.hidden_size
    weight_NK = pack_int8(torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, device=device))
    scale_N = torch.rand(num_out, device=device)
    xq_TK, scale_T = quantize_activations(torch.randn(rows, num_in, device=device, dtype=shapes.dtype), DIVISOR)
    y_TN = torch.empty(rows, num_out, device=device, dtype=shapes.dtype)
    return lambda entry: lambda: int8_matmul_as(entry, arch, xq_TK, scale_T, weight_NK, scale_N, None, y_TN)
