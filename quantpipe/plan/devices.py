"""What a model could run on: the one table of devices, with the source of every row.

A device is memory, the speed of reading it, and how many operations (a multiplication and an addition are two) it
does per second on dense matrices.
"""

import math
import os
from dataclasses import dataclass, replace
from typing import Literal

from quantpipe.engine.device_memory import HostMemory
from quantpipe.errors import RecipeError, suggest
from quantpipe.plan.host_speed import HostSpeed, has_dot_products, measure_host

Kind = Literal["gpu", "cpu"]
CPU = "cpu"
# Of the command line.
OPTION_UNITS = {"bandwidth": ("GB/s", 1e9), "flops": ("TFLOP/s", 1e12), "memory": ("GB", 1e9)}


@dataclass(frozen=True)
class Device:
    """One device. ``float_flops_per_s`` is for weights in bfloat16 (on a CPU float32), and ``int8_flops_per_s`` for
    weights and activations in int8; weights alone in integers are multiplied at ``weight_only_flops_per_s``."""

    name: str
    kind: Kind
    memory_bytes: int
    bandwidth_bytes_per_s: float
    float_flops_per_s: float
    int8_flops_per_s: float
    weight_only_flops_per_s: float
    source: str

    @property
    def balance_flops_per_byte(self) -> float:
        """Operations per byte read at which floating-point arithmetic takes as long as reading."""
        return self.float_flops_per_s / self.bandwidth_bytes_per_s


def _gpu(
    name: str, memory_gb: float, bandwidth_gb_s: float, bf16_tflops: float, int8_tops: float, source: str
) -> Device:
    rates = (bf16_tflops * 1e12, int8_tops * 1e12, bf16_tflops * 1e12)
    return Device(name, "gpu", int(memory_gb * 1e9), bandwidth_gb_s * 1e9, *rates, source)


# Memory in decimal gigabytes as the data sheets have it, a little less than a driver reports. Rates are dense: where a
# data sheet gives those of 2:4 sparsity, half of them.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("A100-80G", 80, 2039, 312, 624, "NVIDIA A100 data sheet, SXM"),
        _gpu("H100", 80, 3350, 989.4, 1978.9, "NVIDIA H100 data sheet, SXM; halved from sparse"),
        _gpu("H200", 141, 4800, 989.4, 1978.9, "NVIDIA H200 data sheet, SXM; halved from sparse"),
        _gpu("L4", 24, 300, 121, 242.5, "NVIDIA L4 data sheet; halved from sparse"),
        _gpu("RTX4090", 24, 1008, 165.2, 660.6, "NVIDIA Ada architecture paper, float32 accumulation"),
    )
}


@dataclass(frozen=True)
class KernelFactors:
    """How fast the compiled kernels multiply next to a float32 matrix product (bench/README.md, "compiled linears")."""

    bfloat16: float
    weight_only: float
    int8: float


AVX2_FACTORS, DOT_PRODUCT_FACTORS = KernelFactors(1.08, 1.6, 1.8), KernelFactors(1.05, 1.8, 3.7)


@dataclass(frozen=True)
class GivenSpeeds:
    """What the command line says of a device; None where it says nothing."""

    bandwidth_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for option, value in self._options().items():
            if value is not None and not 0 < value < math.inf:
                unit, size = OPTION_UNITS[option]
                raise RecipeError(f"--{option}: found {value / size:g} {unit}; give a number above 0")

    def _options(self) -> dict[str, float | None]:
        return {"bandwidth": self.bandwidth_bytes_per_s, "flops": self.flops_per_s, "memory": self.memory_bytes}

    @property
    def missing(self) -> list[str]:
        """The options that were not given."""
        return [f"--{option}" for option, value in self._options().items() if value is None]


def find_device(name: str, given: GivenSpeeds, num_cores: int | None = None) -> Device:
    """The device of that name, with what is ``given`` in place of the table's figures.

    A CPU's are measured where they are not given, in a fraction of a second, for ``num_cores`` (all, if None).
    RecipeError for an unknown name without all three figures.
    """
    if name == CPU:
        return host_device(given, num_cores)
    if name in DEVICES:
        return _with_given(DEVICES[name], given)
    if given.missing:
        known = suggest(name, [*DEVICES, CPU])
        raise RecipeError(f"--gpu: unknown '{name}'{known}; for another device give {', '.join(given.missing)} as well")
    assert given.memory_bytes and given.bandwidth_bytes_per_s and given.flops_per_s, "nothing is missing"
    rates = (given.flops_per_s,) * 3
    return Device(name, "gpu", int(given.memory_bytes), given.bandwidth_bytes_per_s, *rates, "the command line")


def _with_given(device: Device, given: GivenSpeeds) -> Device:
    """``--flops`` is the floating-point rate; the others keep their proportion to it."""
    if len(given.missing) == 3:
        return device
    factor = 1.0 if given.flops_per_s is None else given.flops_per_s / device.float_flops_per_s
    return replace(
        device,
        memory_bytes=int(given.memory_bytes or device.memory_bytes),
        bandwidth_bytes_per_s=given.bandwidth_bytes_per_s or device.bandwidth_bytes_per_s,
        float_flops_per_s=factor * device.float_flops_per_s,
        int8_flops_per_s=factor * device.int8_flops_per_s,
        weight_only_flops_per_s=factor * device.weight_only_flops_per_s,
        source=f"{device.source}; in part the command line",
    )


def host_device(given: GivenSpeeds, num_cores: int | None = None) -> Device:
    """So many cores of this machine; all, if None."""
    is_measured = given.bandwidth_bytes_per_s is None or given.flops_per_s is None
    measured = measure_host(num_cores) if is_measured else HostSpeed(0.0, 0.0)
    factors = DOT_PRODUCT_FACTORS if has_dot_products() else AVX2_FACTORS
    flops = given.flops_per_s or measured.flops_per_s
    return Device(
        name=CPU,
        kind="cpu",
        memory_bytes=int(given.memory_bytes or HostMemory().total_bytes()),
        bandwidth_bytes_per_s=given.bandwidth_bytes_per_s or measured.bandwidth_bytes_per_s,
        float_flops_per_s=factors.bfloat16 * flops,
        int8_flops_per_s=factors.int8 * flops,
        weight_only_flops_per_s=factors.weight_only * flops,
        source=f"{num_cores or os.cpu_count()} cores, measured just now with numpy"
        if is_measured
        else "the command line",
    )


def _host_source(is_measured: bool, num_cores: int) -> str:
    return f"{num_cores} cores, measured just now with numpy" if is_measured else "the command line"
