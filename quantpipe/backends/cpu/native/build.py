"""Compiles the C++ sources beside this file into one shared library, once per machine. Loads nothing.

Every ``isa_<name>.cpp`` is compiled for its own instruction set, the other units for any CPU of the architecture: which
set runs is chosen when the library is loaded. For the cache only those sets are compiled that this CPU has; a library
to be shipped holds all of them, and runs on every CPU of the architecture. ``$QUANTPIPE_EMULATED_ISA``, if it is set,
asks for one more, which only tests use.

``python -m quantpipe.backends.cpu.native.build [FOLDER]`` makes the one for the cache, or one to be shipped in FOLDER,
and prints its path.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantpipe.backends.cpu.native.instruction_sets import EMULATED, INSTRUCTION_SETS, ISA_FLAGS, X86, runnable
from quantpipe.cache import cache_folder
from quantpipe.errors import QuantpipeError

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
COMPILERS = ("g++", "clang++", "c++")
# Products and sums stay apart unless a kernel asks for a fused one, or instruction sets would round differently.
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-fno-math-errno", "-fvisibility-inlines-hidden"),
)
LINK_FLAGS = ("-shared", "-pthread", "-Wl,-Bsymbolic")
# Plain arithmetic is a yardstick, not meant to be fast: -O3 takes minutes to unroll its loops. The compiler notes that
# vectors wider than registers change how functions are called; none is called across units.
YARDSTICKS, YARDSTICK_FLAGS = ("scalar", EMULATED), ("-O1", "-Wno-psabi")
# Where the architecture or the compiler lacks an instruction set, its unit is compiled with this and offers nothing.
ABSENT_FLAG = "-DQP_ISA_ABSENT"
COMPILE_TIMEOUT_S = 600


class BuildError(QuantpipeError):
    """No library can be made here; the message says why, as part of a line."""


def library_path() -> Path:
    """The library of these sources: the one shipped, else the cached one, else compiled now. BuildError if none."""
    isas = wanted_isas()
    cached = cache_folder() / "native" / library_name(isas)
    shipped = [] if EMULATED in isas else [PREBUILT / library_name()]
    for path in (*shipped, cached):
        if path.is_file():
            return path
    find_compiler()  # before anything is said
    logging.getLogger(__name__).warning("quantpipe: compiling the CPU kernels, once on this machine: about a minute")
    return compile_library(cached, isas=isas)


def wanted_isas() -> tuple[str, ...]:
    """The instruction sets that a library for the cache holds."""
    return (*runnable(), *([EMULATED] if os.environ.get("QUANTPIPE_EMULATED_ISA") else []))


def library_name(isas: Sequence[str] = INSTRUCTION_SETS) -> str:
    """A file name that changes with the sources, the flags, the architecture and the instruction sets."""
    digest = hashlib.sha256(repr((FLAGS, YARDSTICK_FLAGS, LINK_FLAGS, [ISA_FLAGS[isa] for isa in isas])).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"quantpipe-{platform.system().lower()}-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> str:
    """``$CXX`` where it is set, else the first C++ compiler on the path."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    if asked:
        raise BuildError(f"$CXX is '{asked}', which is no program")
    raise BuildError(f"no C++ compiler was found; install one ({', '.join(COMPILERS)}) or set $CXX")


def compile_library(target: Path, extra_flags: Sequence[str] = (), isas: Sequence[str] = INSTRUCTION_SETS) -> Path:
    """Compile every unit, in parallel, and link them as ``target``, which appears whole or not at all."""
    compiler = find_compiler()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            objects = _compile_units(compiler, Path(folder), extra_flags, isas)
            built = _link(compiler, objects, Path(folder), extra_flags)
            built.replace(target)
    except OSError as error:
        raise BuildError(
            f"{target.parent}: {error.strerror or error}; set QUANTPIPE_CACHE to a writable folder"
        ) from None
    return target


def _compile_units(compiler: str, folder: Path, extra_flags: Sequence[str], isas: Sequence[str]) -> list[Path]:
    def compile_unit(unit: Path) -> Path:
        flags = (*extra_flags, *_isa_flags(compiler, unit, isas))
        _run([compiler, *FLAGS, *flags, "-c", str(unit), "-o", str(folder / f"{unit.stem}.o")], unit.name)
        return folder / f"{unit.stem}.o"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_unit, _units()))


def _units() -> list[Path]:
    """In the order they are linked in: those for any CPU, then by instruction set."""
    order = [f"isa_{name}" for name in ISA_FLAGS]
    return sorted(
        SOURCES.glob("*.cpp"), key=lambda path: (order.index(path.stem) + 1 if path.stem in order else 0, path)
    )


def _isa_flags(compiler: str, unit: Path, isas: Sequence[str]) -> tuple[str, ...]:
    isa = unit.stem.removeprefix("isa_")
    if unit.stem == isa or isa not in ISA_FLAGS:
        return ()
    if isa not in isas or not _knows(compiler, ISA_FLAGS[isa]):
        return (ABSENT_FLAG,)
    return (*ISA_FLAGS[isa], *(YARDSTICK_FLAGS if isa in YARDSTICKS else ()))


def _knows(compiler: str, isa_flags: Sequence[str]) -> bool:
    """Whether this compiler has these instructions."""
    if not isa_flags:
        return True
    if platform.machine() not in X86:
        return False
    command = [compiler, *isa_flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S).returncode == 0


def _link(compiler: str, objects: Sequence[Path], folder: Path, extra_flags: Sequence[str]) -> Path:
    built = folder / "library.so"
    _run([compiler, *extra_flags, *LINK_FLAGS, *map(str, objects), "-o", str(built)], "linking")
    return built


def _run(command: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]}: {what} took over {COMPILE_TIMEOUT_S} s") from None
    if done.returncode != 0:
        faults = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["failed"]
        )
        raise BuildError(f"{command[0]}: {what}: {faults[0]}")


if __name__ == "__main__":
    print(compile_library(Path(sys.argv[1]) / library_name()) if len(sys.argv) > 1 else library_path())
