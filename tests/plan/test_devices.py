"""Devices: the table, what is given in place of it, and what is refused."""

import math

import pytest

from quantpipe.engine.device_memory import HostMemory
from quantpipe.errors import RecipeError
from quantpipe.plan.devices import DEVICES, GivenSpeeds, find_device


@pytest.mark.parametrize("name", DEVICES)
def test_every_row_is_sound(name: str) -> None:
    device = DEVICES[name]
    assert device.name == name and device.kind == "gpu" and device.source
    assert 20e9 < device.memory_bytes < 200e9
    assert 1e11 < device.bandwidth_bytes_per_s < 1e13
    assert device.int8_flops_per_s > device.float_flops_per_s == device.weight_only_flops_per_s


def test_balance_point_is_arithmetic_over_bandwidth() -> None:
    assert round(DEVICES["H100"].balance_flops_per_byte) == 295


def test_given_figures_take_the_place_of_the_tables() -> None:
    device = find_device("L4", GivenSpeeds(bandwidth_bytes_per_s=2e11, flops_per_s=60.5e12))
    assert device.bandwidth_bytes_per_s == 2e11 and device.memory_bytes == DEVICES["L4"].memory_bytes
    assert device.float_flops_per_s == pytest.approx(60.5e12)
    assert device.int8_flops_per_s == pytest.approx(DEVICES["L4"].int8_flops_per_s / 2)


def test_an_unknown_device_needs_all_three_figures() -> None:
    with pytest.raises(RecipeError, match=r"unknown 'H10O'; did you mean 'H100'\? .*known: A100-80G.*--bandwidth"):
        find_device("H10O", GivenSpeeds())
    with pytest.raises(RecipeError, match=r"unknown 'B300'.*give --memory as well"):
        find_device("B300", GivenSpeeds(8e12, 2e15))
    device = find_device("B300", GivenSpeeds(8e12, 2e15, 288e9))
    assert (device.name, device.memory_bytes, device.int8_flops_per_s) == ("B300", 288_000_000_000, 2e15)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_figures_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(RecipeError, match=r"--bandwidth: found .*; give a number above 0"):
        GivenSpeeds(bandwidth_bytes_per_s=value)


def test_a_cpu_is_measured_and_has_this_machines_memory() -> None:
    device = find_device("cpu", GivenSpeeds())
    assert device.memory_bytes == HostMemory().total_bytes()
    assert device.bandwidth_bytes_per_s > 1e8 and device.float_flops_per_s > 1e8
    assert device.int8_flops_per_s > device.float_flops_per_s
    assert "measured" in device.source


def test_a_cpu_whose_figures_are_given_is_not_measured() -> None:
    device = find_device("cpu", GivenSpeeds(1e10, 1e11, 1e9))
    assert device.bandwidth_bytes_per_s == 1e10 and device.memory_bytes == 10**9
    assert device.source == "the command line"
