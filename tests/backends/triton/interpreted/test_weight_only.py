"""Weight-only products in the interpreter, against float64."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.launch_table import ONE_ROW, WEIGHT_ONLY, MatmulLaunch, RowLaunch
from quantpipe.backends.triton.ops.weight_only import matmul_as, one_row_matmul_as, weight_only_matmul
from quantpipe.backends.triton.ops.weight_panels import pack_weights
from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import WeightScheme, weight_only

GENERATOR = torch.Generator().manual_seed(0)
ENTRIES = sorted({entry for entries in WEIGHT_ONLY.values() for _, entry in entries}, key=str)
# Products of exact numbers, summed in float32.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-4}


def stored(scheme: WeightScheme, num_out: int, num_in: int, scale_dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Random integers, scales and (or None) zero points, as an artifact holds them."""
    num_groups = scheme.num_groups(num_in)

    def integers(*shape: int) -> Tensor:
        return torch.randint(scheme.q_min, scheme.q_max + 1, shape, generator=GENERATOR, dtype=torch.int8)

    scale_NG = (torch.rand(num_out, num_groups, generator=GENERATOR) * 0.1 + 0.01).to(scale_dtype)
    return [integers(num_out, num_in), scale_NG, None if scheme.symmetric else integers(num_out, num_groups)]


def rows(num_rows: int, num_in: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, num_in, generator=GENERATOR).to(dtype)


def expected(x_TK: Tensor, parts: list[Tensor], bias_N: Tensor | None = None) -> Tensor:
    y_TN = x_TK.double() @ decode(*parts).double().T
    return y_TN if bias_N is None else y_TN + bias_N.double()


@pytest.mark.parametrize("num_rows", [1, 3], ids=["one_row", "rows"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, None], ids=str)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_scheme_is_what_it_decodes_to(bits: int, group_size: int | None, symmetric: bool, num_rows: int) -> None:
    scheme = weight_only(bits, group_size, symmetric)
    num_in = 3 * (group_size or 100)  # one scale per channel goes with any number of columns
    parts = stored(scheme, 40, num_in)
    x_TK, y_TN = rows(num_rows, num_in), torch.empty(num_rows, 40)
    weight_only_matmul(x_TK, pack_weights(*parts, scheme), None, y_TN)
    torch.testing.assert_close(y_TN.double(), expected(x_TK, parts), **TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 3], ids=["one_row", "rows"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_weights_are_what_the_identity_brings_out(bits: int, num_rows: int) -> None:
    scheme = weight_only(bits, 32, symmetric=False)
    parts = stored(scheme, 24, 64)
    weights, weight_NK = pack_weights(*parts, scheme), decode(*parts)
    for start in range(0, 64, 23):
        eye_TK = torch.eye(64)[start : start + num_rows]
        y_TN = torch.empty(len(eye_TK), 24)
        weight_only_matmul(eye_TK, weights, None, y_TN)
        assert torch.equal(y_TN, weight_NK.T[start : start + num_rows])


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_launch_covers_every_row_and_column(entry: MatmulLaunch, bits: int) -> None:
    scheme = weight_only(bits, 64)
    num_rows, num_out, num_in = entry.block_rows + 3, entry.block_out + 8, 128
    parts, x_TK = stored(scheme, num_out, num_in), rows(num_rows, num_in)
    bias_N, y_TN = torch.randn(num_out, generator=GENERATOR), torch.empty(num_rows, num_out)
    matmul_as(entry, 80, x_TK, pack_weights(*parts, scheme), bias_N, y_TN)
    torch.testing.assert_close(y_TN.double(), expected(x_TK, parts, bias_N), **TOLERANCE)


# Beside those of the table one that reads several panels at a time, the last of them beyond the end of K.
@pytest.mark.parametrize("entry", [*sorted(set(ONE_ROW.values()), key=str), RowLaunch(32, 4, 4)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_launch_of_one_row_covers_every_column(entry: RowLaunch, bits: int) -> None:
    scheme = weight_only(bits, 64)
    num_out, num_in = 2 * entry.block_out + 8, 64 * (2 * entry.block_panels + 3)
    parts, x_1K = stored(scheme, num_out, num_in), rows(1, num_in)
    bias_N, y_1N = torch.randn(num_out, generator=GENERATOR), torch.empty(1, num_out)
    one_row_matmul_as(entry, 80, x_1K, pack_weights(*parts, scheme), bias_N, y_1N)
    torch.testing.assert_close(y_1N.double(), expected(x_1K, parts, bias_N), **TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("group_size", [64, None], ids=str)
def test_split_sums_and_rows_of_wider_tensors(group_size: int | None, num_rows: int) -> None:
    scheme = weight_only(4, group_size)
    num_out, num_in = 40, 64 * 37
    assert launch_table.num_splits(80, 2, 1, 37) == 9
    parts, x_wide = stored(scheme, num_out, num_in), rows(num_rows, num_in + 32)
    bias_N, y_wide = torch.randn(num_out, generator=GENERATOR), torch.zeros(num_rows, num_out + 32)
    x_TK, y_TN = x_wide[:, 16:-16], y_wide[:, 16:-16]
    weight_only_matmul(x_TK, pack_weights(*parts, scheme), bias_N, y_TN)
    torch.testing.assert_close(y_TN.double(), expected(x_TK, parts, bias_N), rtol=1e-5, atol=1e-3)
    assert not y_wide[:, :16].any() and not y_wide[:, -16:].any()


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_only_the_result(dtype: torch.dtype, scale_dtype: torch.dtype, num_rows: int) -> None:
    scheme = weight_only(8, 32, symmetric=False)
    parts, x_TK = stored(scheme, 24, 96, scale_dtype), rows(num_rows, 96, dtype)
    wide, y_TN = torch.empty(num_rows, 24), torch.empty(num_rows, 24, dtype=dtype)
    weights = pack_weights(*parts, scheme)
    weight_only_matmul(x_TK, weights, None, wide)
    weight_only_matmul(x_TK, weights, None, y_TN)
    torch.testing.assert_close(wide.double(), expected(x_TK, parts), rtol=1e-5, atol=1e-3)
    assert torch.equal(y_TN, wide.to(dtype))


def test_no_rows_are_written_for_no_rows() -> None:
    scheme = weight_only(4, 64)
    weight_only_matmul(rows(0, 64), pack_weights(*stored(scheme, 8, 64), scheme), None, torch.empty(0, 8))
