"""Which instruction sets are compiled for the CPU at hand, by what Linux says of it."""

from pathlib import Path

import pytest

from quantpipe.backends.cpu.native import instruction_sets
from quantpipe.backends.cpu.native.instruction_sets import INSTRUCTION_SETS, runnable

AVX2 = "fpu sse2 fma avx2 f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq avx512_vnni"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(instruction_sets.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(instruction_sets, "CPU_INFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("fpu sse2", ("scalar",)),
        ("fpu sse2 avx2", ("scalar",)),  # without fused products: no such kernel
        (AVX2, ("scalar", "avx2")),
        (f"{AVX2} avx_vnni", ("scalar", "avx2", "avxvnni")),
        (AVX512, ("scalar", "avx2", "avx512")),
        (f"{AVX512} avx_vnni", ("scalar", "avx2", "avxvnni", "avx512")),
    ],
)
def test_sets_are_those_whose_every_feature_is_there(cpu: Path, features: str, expected: tuple[str, ...]) -> None:
    cpu.write_text(f"processor\t: 0\nflags\t\t: {features}\n\nprocessor\t: 1\nflags\t\t: {features}\n")
    assert runnable() == expected


def test_a_cpu_that_does_not_tell_gets_all_of_them(cpu: Path) -> None:
    assert runnable() == INSTRUCTION_SETS
    cpu.write_text("processor\t: 0\n")
    assert runnable() == INSTRUCTION_SETS


def test_another_architecture_gets_plain_arithmetic(cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets.platform, "machine", lambda: "aarch64")
    assert runnable() == ("scalar",)
