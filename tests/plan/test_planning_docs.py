"""docs/planning.md shows the devices and constants that the planner uses."""

from pathlib import Path

from quantpipe.plan.devices import AVX2_FACTORS, DEVICES, DOT_PRODUCT_FACTORS
from quantpipe.plan.levers import ACCEPTED_FRAC, NUM_GUESSES
from quantpipe.plan.memory import MAX_BATCHED_TOKENS, PROCESS_BYTES, UTILIZATION
from quantpipe.plan.roofline import EFFICIENCY

TEXT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())


def rows_of(heading: str) -> list[list[str]]:
    lines = TEXT[TEXT.index(heading) :].splitlines()
    table = [line for line in lines[: lines.index("", 2)] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_table_of_devices_is_the_planners() -> None:
    figures = [
        [
            device.name,
            f"{device.memory_bytes / 1e9:g}",
            f"{device.bandwidth_bytes_per_s / 1e9:g}",
            f"{device.float_flops_per_s / 1e12:g}",
            f"{device.int8_flops_per_s / 1e12:g}",
            device.source,
        ]
        for device in DEVICES.values()
    ]
    assert rows_of("| device |") == figures


def test_the_table_of_efficiencies_is_the_planners() -> None:
    shown = {row[0]: row[1:4] for row in rows_of("| kind |")}
    assert shown == {
        kind: [f"{own.memory_frac:.0%}".replace("%", " %"), f"{own.compute_frac:.0%}".replace("%", " %"), overhead]
        for kind, own in EFFICIENCY.items()
        for overhead in [f"{1e3 * own.overhead_s:g} ms"]
    }


def test_the_constants_in_the_text_are_the_planners() -> None:
    for process, kind in (("290 MB on a CPU", "cpu"), ("600 MB on a GPU", "gpu")):
        assert process in WORDS and int(process.split()[0]) * 10**6 == PROCESS_BYTES[kind]  # type: ignore[index]
    assert f"T = {MAX_BATCHED_TOKENS} tokens of a step" in WORDS
    assert f"{UTILIZATION:.0%}".replace("%", " %") + " of the device's memory is planned for" in WORDS
    assert f"k = {NUM_GUESSES} and a = {ACCEPTED_FRAC}" in WORDS
    fast, plain = DOT_PRODUCT_FACTORS, AVX2_FACTORS
    assert f"{fast.bfloat16} (bfloat16), {fast.weight_only} (weights in integers) and {fast.int8} times" in WORDS
    assert f"{plain.bfloat16}, {plain.weight_only} and {plain.int8} times" in WORDS
