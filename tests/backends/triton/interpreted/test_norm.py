"""RMS norms in the interpreter, against float64."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.triton.ops.norm import MAX_SIZE, rms_norm, rms_norm_quantized
from quantpipe.errors import QuantpipeError
from quantpipe.formats.layout import quantize_activations

EPS = 1e-5
# One rounding to the dtype that is stored, and float32 arithmetic before it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(x: Tensor, weight_H: Tensor) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight_H.double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 4096), (70, 48)], ids=str)
def test_norm_is_that_of_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x_TH, weight_H = rows(*shape, dtype=dtype), rows(shape[1], seed=1)
    y_TH = rms_norm(x_TH, weight_H, EPS)
    assert y_TH.dtype == dtype
    torch.testing.assert_close(y_TH.double(), expected(x_TH, weight_H), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_residual_is_added_in_place_and_normed_as_stored(dtype: torch.dtype) -> None:
    x_TH, residual_TH, weight_H = rows(3, 100, dtype=dtype), rows(3, 100, dtype=dtype, seed=1), rows(100, seed=2)
    sum_TH = (x_TH.float() + residual_TH.float()).to(dtype)
    y_TH = rms_norm(x_TH, weight_H, EPS, residual_TH)
    assert torch.equal(residual_TH, sum_TH)
    torch.testing.assert_close(y_TH.double(), expected(sum_TH, weight_H), rtol=TOLERANCE[dtype], atol=1e-6)


def test_heads_inside_a_wider_row_are_normed_one_by_one() -> None:
    heads_THD = rows(5, 7 * 40)[:, 40 : 4 * 40].view(5, 3, 40)[:, :, :32]
    weight_D = rows(32, seed=1)
    y_THD = rms_norm(heads_THD, weight_D, EPS)
    assert y_THD.is_contiguous()
    torch.testing.assert_close(y_THD.double(), expected(heads_THD, weight_D), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("divisor", [127.0, 127.5])
@pytest.mark.parametrize("has_residual", [False, True])
def test_quantized_norm_is_the_norm_by_the_rule_of_activations(has_residual: bool, divisor: float) -> None:
    x_TH, weight_H = rows(6, 192), rows(192, seed=1)
    x_TH[2] = 0  # a row of zeros is divided by its scale all the same
    residual_TH, again_TH = (rows(6, 192, seed=2) if has_residual else None for _ in range(2))
    if residual_TH is not None and again_TH is not None:
        residual_TH[2] = again_TH[2] = 0
    codes_TH, scale_T = rms_norm_quantized(x_TH, weight_H, EPS, residual_TH, divisor)
    normed_TH = rms_norm(x_TH, weight_H, EPS, again_TH)
    wanted_TH, wanted_T1 = quantize_activations(normed_TH, divisor)
    assert torch.equal(codes_TH, wanted_TH)
    assert torch.equal(scale_T, wanted_T1.flatten())
    if has_residual:
        assert torch.equal(residual_TH, again_TH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_quantized_was_not_rounded_before(dtype: torch.dtype) -> None:
    x_TH, weight_H = rows(2, 64, dtype=dtype), rows(64, seed=1)
    codes_TH, scale_T = rms_norm_quantized(x_TH, weight_H, EPS, None, 127.0)
    wanted_TH, wanted_T1 = quantize_activations(rms_norm(x_TH.float(), weight_H, EPS))
    assert torch.equal(codes_TH, wanted_TH)
    assert torch.equal(scale_T, wanted_T1.flatten())


def test_a_row_with_nan_or_infinity_stays_so() -> None:
    x_TH = rows(4, 64)
    x_TH[0, 3], x_TH[1, 5] = torch.nan, torch.inf
    _, scale_T = rms_norm_quantized(x_TH, torch.ones(64), EPS, None, 127.0)
    assert not scale_T[:2].isfinite().any()
    assert scale_T[2:].isfinite().all()


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(torch.empty(0, 64), torch.ones(64), EPS).shape == (0, 64)


def test_a_row_that_no_program_holds_is_refused() -> None:
    with pytest.raises(QuantpipeError, match=f"has one over {MAX_SIZE + 1}"):
        rms_norm(torch.ones(1, MAX_SIZE + 1), torch.ones(MAX_SIZE + 1), EPS)
