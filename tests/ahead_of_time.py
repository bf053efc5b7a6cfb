"""Compiles what a launcher would launch, for a GPU that need not be there, and reads what the compiler made of it.

A launcher is called with tensors on the meta device. ``launches`` notes each kernel with its arguments instead of
running it, and ``compile_launch`` compiles it as Triton would at that call: constants, numbers equal to 1 or divisible
by 16, the launch table's parameters.
"""

import functools
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quantpipe.backends.triton import launch_table

ARCHITECTURES = (80, 86, 89, 90, 100)
# Bytes of shared memory that one program may have. The compiler does not refuse more: the launch would fail.
SHARED_LIMIT_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}
MAX_REGISTERS = 255
# Columns of the tensor memory of sm_100. The compiler makes an empty kernel of one that needs more.
MAX_TENSOR_MEMORY = 512
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One kernel as it was to be launched: arguments by name, grid and compiler options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs of the GPU, and its code."""

    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    tensor_memory: int
    shared_bytes: int
    sass: str
    ptx: str

    def count(self, instruction: str) -> int:
        """How many instructions of the machine code begin so: ``HMMA``, ``LDG.E.128`` ..."""
        return len(re.findall(rf"(?<![\w.]){re.escape(instruction)}\b", self.sass))

    def reads_in_16_bytes(self) -> bool:
        """Whether there are copies from global to shared memory, and all of them are of the widest kind."""
        copies = re.findall(r"LDGSTS[\w.]*", self.sass)
        return bool(copies) and all(copy.endswith(".128") for copy in copies)


def launches(monkeypatch: pytest.MonkeyPatch, arch: int, call: Callable[[], object]) -> list[Launch]:
    """The kernels that ``call`` launches on a GPU of architecture ``arch``, in order. Nothing runs."""
    noted: list[Launch] = []

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        noted.append(Launch(kernel, arguments, grid(arguments) if callable(grid) else grid, options))

    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", note)
        patched.setattr(launch_table, "architecture", lambda device: arch)
        call()
    return noted


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Compile it for ``sm_<arch>`` and read the result."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        signature[parameter.name] = kind = "constexpr" if parameter.is_constexpr else _type_of(value)
        if kind == "constexpr":
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    usage, sass = _disassemble(kernel.asm["cubin"])
    return Compiled(
        name=launch.kernel.__name__,
        registers=usage["REG"],
        stack_bytes=usage["STACK"],
        local_bytes=usage["LOCAL"],
        tensor_memory=getattr(kernel.metadata, "tmem_size", 0) or 0,
        shared_bytes=kernel.metadata.shared,
        sass=sass,
        ptx=kernel.asm["ptx"],
    )


def compile_all(monkeypatch: pytest.MonkeyPatch, arch: int, call: Callable[[], object]) -> list[Compiled]:
    """Everything that ``call`` launches on ``sm_<arch>``, compiled and within what such a GPU has."""
    compiled = [compile_launch(launch, arch) for launch in launches(monkeypatch, arch, call)]
    assert compiled, "nothing was launched"
    for kernel in compiled:
        check_resources(kernel, arch)
    return compiled


def check_resources(kernel: Compiled, arch: int) -> None:
    """No register is spilled to memory, and one program fits on the GPU."""
    where = f"{kernel.name} on sm_{arch}"
    assert kernel.stack_bytes == 0, f"{where}: {kernel.stack_bytes} bytes of stack"
    assert kernel.local_bytes == 0, f"{where}: {kernel.local_bytes} bytes of local memory"
    assert not kernel.count("STL") and not kernel.count("LDL"), f"{where}: registers are spilled"
    assert kernel.registers <= MAX_REGISTERS, f"{where}: {kernel.registers} registers"
    assert kernel.tensor_memory <= MAX_TENSOR_MEMORY, f"{where}: {kernel.tensor_memory} columns of tensor memory"
    assert "STG" in kernel.sass, f"{where}: nothing is stored"
    assert kernel.shared_bytes <= SHARED_LIMIT_BYTES[arch], f"{where}: {kernel.shared_bytes} bytes of shared memory"


def _type_of(value: Any) -> str:
    """The type under which Triton specialises a kernel for an argument that is not declared constant."""
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
        return "constexpr"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), f"a kernel was given {value!r}"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@functools.cache
def _disassemble(cubin: bytes) -> tuple[dict[str, int], str]:
    """Resource usage (registers, bytes of stack and local memory) and machine code."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        dump = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", "-sass", path], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:\d+.*", dump)
    assert usage is not None, dump[:500]
    return {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", usage[0])}, dump
