"""8-bit products compiled for each architecture: every entry of its table."""

import pytest
import torch
from ahead_of_time import compile_all

from quantpipe.backends.triton.launch_table import INT8
from quantpipe.backends.triton.ops import int8

# Integer products of the tensor cores, of one warp and (sm_90) of four.
TENSOR_CORES = ("IMMA", "IGMMA")
SIZES = {"up_to_16": 16, "up_to_32": 32, "up_to_64": 64, "many": 300}


def test_every_entry_is_asked_for() -> None:
    for entries in INT8.values():
        chosen = {next(limit for limit, _ in entries if num_rows <= limit) for num_rows in SIZES.values()}
        assert chosen == {limit for limit, _ in entries}


@pytest.mark.parametrize("num_rows", SIZES.values(), ids=SIZES)
def test_int8_matmul_compiles_to_tensor_cores(monkeypatch: pytest.MonkeyPatch, arch: int, num_rows: int) -> None:
    num_out = num_in = 4096

    def call() -> None:
        int8.int8_matmul(
            torch.empty(num_rows, num_in, dtype=torch.int8, device="meta"),
            torch.empty(num_rows, device="meta"),
            torch.empty(num_out, num_in, dtype=torch.int8, device="meta"),
            torch.empty(num_out, device="meta"),
            torch.empty(num_out, device="meta"),
            torch.empty(num_rows, num_out, dtype=torch.bfloat16, device="meta"),
        )

    matmul, *adding = compile_all(monkeypatch, arch, call)
    assert any(matmul.count(name) for name in TENSOR_CORES), "no tensor core is used"
    assert matmul.reads_in_16_bytes(), "tiles are copied in pieces smaller than 16 bytes"
    for kernel in adding:
        assert kernel.count("LDG.E.128"), "sums are read in pieces smaller than 16 bytes"
        assert not kernel.count("FFMA"), "a scale and a bias in one operation: not what the CPU computes"


def test_quantization_compiles_to_rounded_divisions(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    x_TK = torch.empty(32, 4096, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_all(monkeypatch, arch, lambda: int8.quantize_activations(x_TK, 127.0))
    assert "div.rn.f32" in kernel.ptx, "codes would differ from those of other backends"
    assert kernel.count("LDG.E.128"), "rows are read in pieces smaller than 16 bytes"
