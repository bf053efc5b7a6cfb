"""What is installed and what this machine has, a line each. Loads and compiles nothing that is not there already."""

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

State = Literal["ok", "note", "fault"]
# What the runtime cannot do without, and from which version on.
REQUIRED = {"torch": (2, 9), "numpy": (2, 0), "safetensors": (0, 8), "tokenizers": (0, 22)}
OPTIONAL = {"triton": (3, 6), "transformers": (5, 17)}
MIN_PYTHON = (3, 11)


@dataclass(frozen=True)
class Fact:
    """``note``: something is not there, and only what needs it does not run. ``fault``: nothing runs as it should."""

    subject: str
    found: str
    state: State = "ok"


def machine_facts() -> list[Fact]:
    """Versions, CPU, compiled kernels, Triton and GPUs."""
    return [*_versions(), *_cpu(), *_gpus()]


def is_interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them for a GPU."""
    if find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _versions() -> Iterator[Fact]:
    from quantpipe import __version__

    yield Fact("quantpipe", __version__)
    python = platform.python_version()
    is_old = sys.version_info < MIN_PYTHON
    yield Fact("python", f"{python}: {_from(MIN_PYTHON)} is needed" if is_old else python, "fault" if is_old else "ok")
    for name, lowest in REQUIRED.items():
        yield _package(name, lowest, "fault")
    for name, lowest in OPTIONAL.items():
        yield _package(name, lowest, "note")


def _package(name: str, lowest: tuple[int, ...], otherwise: State) -> Fact:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Fact(name, f"not installed; {_from(lowest)} is needed for {_purpose(name)}", otherwise)
    parts = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if parts < lowest:
        return Fact(name, f"{found}; {_from(lowest)} is needed for {_purpose(name)}", otherwise)
    return Fact(name, found)


def _purpose(name: str) -> str:
    return {"triton": "engine.backend 'triton'", "transformers": "quantizing and evaluating"}.get(name, "everything")


def _from(lowest: tuple[int, ...]) -> str:
    return f"{'.'.join(map(str, lowest))} or later"


def _cpu() -> Iterator[Fact]:
    from quantpipe.backends.cpu.native.build import PREBUILT, BuildError, find_compiler, library_name, wanted_isas
    from quantpipe.backends.cpu.native.instruction_sets import runnable
    from quantpipe.cache import cache_folder

    yield Fact("cpu", f"{platform.machine()}, instruction sets of kernels: {', '.join(runnable())}")
    cached = cache_folder() / "native" / library_name(wanted_isas())
    for path in (PREBUILT / library_name(), cached):
        if path.is_file():
            yield Fact("cpu kernels", f"compiled, {path}")
            return
    try:
        yield Fact("cpu kernels", f"not compiled yet; {find_compiler()} will, at the first start of backend 'cpu'")
    except BuildError as error:
        yield Fact("cpu kernels", f"not compiled, and backend 'cpu' runs on torch's operators: {error}", "note")


def _gpus() -> Iterator[Fact]:
    if find_spec("torch") is None:
        return
    import torch

    if is_interpreted():
        found = "TRITON_INTERPRET is set, so engine.backend 'triton' is interpreted on the CPU: slow, for tests"
        yield Fact("triton kernels", found, "note")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU or no driver"
        then = "" if is_interpreted() else "; engine.backend 'triton' does not run here"
        yield Fact("cuda", f"none: {why}{then}", "note")
        return
    yield Fact("cuda", f"{torch.version.cuda}, {torch.cuda.device_count()} GPU(s)")
    for index in range(torch.cuda.device_count()):
        yield _gpu(index)


def _gpu(index: int) -> Fact:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    text = (
        f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} "
        f"multiprocessors, {total_bytes:,} bytes, {free_bytes:,} free"
    )
    if find_spec("triton") is None:
        return Fact(f"gpu {index}", f"{text}; without triton nothing of ours runs on it", "note")
    from quantpipe.backends.triton.requirements import capability_fault

    fault = capability_fault(properties.name, (properties.major, properties.minor))
    if fault is not None:
        return Fact(f"gpu {index}", f"{text}; engine.backend 'triton' {fault}", "note")
    return Fact(f"gpu {index}", text)
