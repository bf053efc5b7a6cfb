"""Gated activations compiled for each architecture."""

import pytest
import torch
from ahead_of_time import compile_all

from quantpipe.backends.triton.ops.activation import gated, gated_quantized


def test_gated_compiles(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    gate_up = torch.empty(32, 2 * 11008, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_all(monkeypatch, arch, lambda: gated(gate_up, "silu"))
    assert kernel.count("LDG.E.128"), "rows are read in pieces smaller than 16 bytes"


def test_quantized_gated_compiles_to_rounded_divisions(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    gate_up = torch.empty(32, 2 * 11008, dtype=torch.float16, device="meta")
    (kernel,) = compile_all(monkeypatch, arch, lambda: gated_quantized(gate_up, "gelu_tanh", 127.0))
    assert "div.rn.f32" in kernel.ptx, "codes would differ from those of other backends"
    assert kernel.count("LDG.E.128"), "rows are read in pieces smaller than 16 bytes"
