"""The search for the most likely token compiled for each architecture."""

import pytest
import torch
from ahead_of_time import compile_all

from quantpipe.backends.triton.ops.sampling import most_likely


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_search_for_the_most_likely_compiles(monkeypatch: pytest.MonkeyPatch, arch: int, dtype: torch.dtype) -> None:
    logits_RV = torch.empty(8, 128256, dtype=dtype, device="meta")
    of_part, _ = compile_all(monkeypatch, arch, lambda: most_likely(logits_RV))
    assert of_part.count("LDG.E.128"), "logits are read in pieces smaller than 16 bytes"
