"""Gated activations in the interpreter, against float64."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.activations import ACTIVATIONS
from quantpipe.backends.triton.ops.activation import MAX_BLOCK_SIZE, gated, gated_quantized
from quantpipe.formats.layout import quantize_activations
from quantpipe.models.description import Activation

# One rounding to the dtype that is stored, and float32 arithmetic before it.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def rows(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 96), (5, 1536), (2, MAX_BLOCK_SIZE + 8)], ids=str)
def test_gated_is_that_of_float64(shape: tuple[int, int], dtype: torch.dtype, activation: Activation) -> None:
    gate_up = rows(*shape, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    x_TI = gated(gate_up, activation)
    assert x_TI.dtype == dtype
    expected = ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(x_TI.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("divisor", [127.0, 127.5])
@pytest.mark.parametrize("size", [96, MAX_BLOCK_SIZE + 8])
def test_quantized_is_gated_by_the_rule_of_activations(size: int, divisor: float, activation: Activation) -> None:
    gate_up = rows(4, size)
    gate_up[1] = 0
    codes_TI, scale_T = gated_quantized(gate_up, activation, divisor)
    wanted_TI, wanted_T1 = quantize_activations(gated(gate_up, activation), divisor)
    assert torch.equal(codes_TI, wanted_TI)
    assert torch.equal(scale_T, wanted_T1.flatten())


def test_what_is_quantized_was_not_rounded_before() -> None:
    gate_up = rows(2, 64, torch.bfloat16)
    wanted_TI, wanted_T1 = quantize_activations(gated(gate_up.float(), "silu"))
    codes_TI, scale_T = gated_quantized(gate_up, "silu", 127.0)
    assert torch.equal(codes_TI, wanted_TI)
    assert torch.equal(scale_T, wanted_T1.flatten())


def test_large_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 3.0, 5.0]])
    for activation in ACTIVATIONS:
        torch.testing.assert_close(gated(gate_up, activation), torch.tensor([[0.0, 1000.0]]))


def test_no_rows_give_no_rows() -> None:
    assert gated(torch.empty(0, 64), "silu").shape == (0, 32)
    assert gated_quantized(torch.empty(0, 64), "silu", 127.0)[0].shape == (0, 32)
