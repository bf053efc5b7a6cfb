"""Weight-only products compiled for each architecture: every entry of its table."""

import re

import pytest
import torch
from ahead_of_time import compile_all
from torch import Tensor

from quantpipe.backends.triton.launch_table import WEIGHT_ONLY
from quantpipe.backends.triton.ops.weight_only import weight_only_matmul
from quantpipe.backends.triton.ops.weight_panels import PackedWeights, pack_weights
from quantpipe.formats.scheme import WeightScheme, w4a16, weight_only

# Products of the tensor cores: of one warp, of four (sm_90), of one thread for all (sm_100).
TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")
SIZE = 4096
NUM_ROWS = {"up_to_16": 16, "up_to_32": 32, "up_to_64": 64, "many": 300}
# What differs in the code of a kernel: bits, zero points, and how many products share a scale.
SCHEMES = [weight_only(4, 32, False), weight_only(8, None), weight_only(8, 128, False)]


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def packed(scheme: WeightScheme) -> PackedWeights:
    num_groups = scheme.num_groups(SIZE)
    zero_NG = None if scheme.symmetric else meta(SIZE, num_groups, dtype=torch.int8)
    return pack_weights(
        meta(SIZE, SIZE, dtype=torch.int8), meta(SIZE, num_groups, dtype=torch.bfloat16), zero_NG, scheme
    )


def call(scheme: WeightScheme, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x_TK, y_TN = meta(num_rows, SIZE, dtype=dtype), meta(num_rows, SIZE, dtype=dtype)
    weight_only_matmul(x_TK, packed(scheme), meta(SIZE, dtype=torch.float32), y_TN)


def test_every_entry_is_asked_for() -> None:
    for entries in WEIGHT_ONLY.values():
        chosen = {next(limit for limit, _ in entries if num_rows <= limit) for num_rows in NUM_ROWS.values()}
        assert chosen == {limit for limit, _ in entries}


@pytest.mark.parametrize("num_rows", NUM_ROWS.values(), ids=NUM_ROWS)
def test_every_entry_compiles_to_tensor_cores(monkeypatch: pytest.MonkeyPatch, arch: int, num_rows: int) -> None:
    matmul, *_ = compile_all(monkeypatch, arch, lambda: call(w4a16(64), num_rows))
    assert any(matmul.count(name) for name in TENSOR_CORES), "no tensor core is used"
    assert matmul.count("LDGSTS.E.BYPASS.128"), "words are copied in pieces smaller than 16 bytes"
    # Expanding in place: a weight that went through shared memory on its way would be stored there two bytes at a time.
    assert not re.search(r"\bSTS\.U16\b", matmul.sass), "weights are exchanged between threads"


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
def test_the_largest_tiles_of_every_scheme_fit(
    monkeypatch: pytest.MonkeyPatch, arch: int, scheme: WeightScheme
) -> None:
    matmul, *_ = compile_all(monkeypatch, arch, lambda: call(scheme, 300, torch.float16))
    assert any(matmul.count(name) for name in TENSOR_CORES), "no tensor core is used"


@pytest.mark.parametrize("scheme", [w4a16(64), weight_only(8, 32, False)], ids=lambda scheme: scheme.label)
def test_one_row_compiles_without_exchange(monkeypatch: pytest.MonkeyPatch, arch: int, scheme: WeightScheme) -> None:
    matmul, *adding = compile_all(monkeypatch, arch, lambda: call(scheme, 1))
    assert matmul.count("LDG.E.128"), "words are read in pieces smaller than 16 bytes"
    assert matmul.count("SHFL.BFLY") <= 8, "sums are exchanged between threads before the end"
    assert adding, "K is not split, so most of the GPU is idle"
