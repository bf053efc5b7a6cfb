"""Copies of KV blocks compiled for each architecture."""

import pytest
import torch
from ahead_of_time import compile_all

from quantpipe.backends.triton.ops.copy_blocks import copy_blocks


def test_copies_compile_to_wide_loads_and_stores(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    pool = torch.empty(32, 1024, 16, 8, 128, dtype=torch.bfloat16, device="meta")
    (kernel,) = compile_all(monkeypatch, arch, lambda: copy_blocks(pool, [(1, 2), (3, 4)]))
    assert kernel.count("LDG.E.128"), "blocks are read in pieces smaller than 16 bytes"
    assert kernel.count("STG.E.128"), "blocks are written in pieces smaller than 16 bytes"


def test_copies_that_overlap_pass_through_memory_of_their_own(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    pool = torch.empty(32, 1024, 16, 8, 64, dtype=torch.int8, device="meta")
    kernels = compile_all(monkeypatch, arch, lambda: copy_blocks(pool, [(1, 2), (2, 3)]))
    assert [kernel.name for kernel in kernels] == ["copy_blocks_kernel", "copy_blocks_kernel"]
