"""RMS norms compiled for each architecture."""

import pytest
import torch
from ahead_of_time import compile_all

from quantpipe.backends.triton.ops.norm import MAX_SIZE, rms_norm, rms_norm_quantized


@pytest.mark.parametrize("size", [64, MAX_SIZE])
def test_norm_compiles(monkeypatch: pytest.MonkeyPatch, arch: int, size: int) -> None:
    x_TH = torch.empty(32, size, dtype=torch.bfloat16, device="meta")
    weight_H = torch.empty(size, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_all(monkeypatch, arch, lambda: rms_norm(x_TH, weight_H, 1e-5, torch.empty_like(x_TH)))
    assert kernel.count("LDG.E.128"), "rows are read in pieces smaller than 16 bytes"


def test_quantized_norm_compiles_to_rounded_divisions(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    x_TH = torch.empty(32, 4096, dtype=torch.float16, device="meta")
    weight_H = torch.empty(4096, device="meta")
    (kernel,) = compile_all(
        monkeypatch, arch, lambda: rms_norm_quantized(x_TH, weight_H, 1e-5, torch.empty_like(x_TH), 127.0)
    )
    assert "div.rn.f32" in kernel.ptx, "codes would differ from those of other backends"
