"""The instruction sets that kernels are compiled for, and which of them this CPU has, as far as one can tell."""

import platform
from pathlib import Path

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
# Compiler flags by name. Ascending: of an inline function that several units hold the linker keeps the first, which
# must run anywhere.
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "scalar": (),
    "emulated": (),
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx512": (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
}
# Plain arithmetic in the form of the widest vectors: no CPU's own, compiled for tests only.
EMULATED = "emulated"
# What a CPU may have.
INSTRUCTION_SETS = tuple(name for name in ISA_FLAGS if name != EMULATED)
X86 = ("x86_64", "AMD64")
CPU_INFO = Path("/proc/cpuinfo")
# What Linux calls the features that a set needs.
_FEATURES = {
    "avx2": {"avx2", "fma", "f16c", "bmi2"},
    "avxvnni": {"avx2", "fma", "f16c", "bmi2", "avx_vnni"},
    "avx512": {"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
}


def runnable() -> tuple[str, ...]:
    """Those that are worth compiling for use here: all of them where the CPU does not tell what it has."""
    if platform.machine() not in X86:
        return ("scalar",)
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return INSTRUCTION_SETS
    features = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), None)
    if features is None:
        return INSTRUCTION_SETS
    return tuple(name for name in INSTRUCTION_SETS if _FEATURES.get(name, set()) <= features)
