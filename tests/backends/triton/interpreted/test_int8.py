"""8-bit products in the interpreter: equal, not close, to the rule of layout and to the CPU backend."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.cpu.int8 import ExactInt8Linear
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.backends.triton import launch_table
from quantpipe.backends.triton.launch_table import INT8, MatmulLaunch
from quantpipe.backends.triton.ops import int8
from quantpipe.formats import layout
from quantpipe.formats.scheme import w8a8
from quantpipe.models.weights import LinearWeights

GENERATOR = torch.Generator().manual_seed(0)
ENTRIES = sorted({entry for entries in INT8.values() for _, entry in entries}, key=str)


def codes(*shape: int) -> Tensor:
    q = torch.randint(-128, 128, shape, generator=GENERATOR, dtype=torch.int8)
    q[0, :] = -128  # the largest sums there can be
    return q


def scales(size: int) -> Tensor:
    return torch.rand(size, generator=GENERATOR) * 0.02 + 1e-3


def wanted(xq_TK: Tensor, scale_T: Tensor, q_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None) -> Tensor:
    sum_TN = (xq_TK.double() @ q_NK.double().T).float()
    y_TN = sum_TN * scale_N * scale_T[:, None]
    return y_TN if bias_N is None else y_TN + bias_N


@pytest.mark.parametrize("divisor", [127.0, 127.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 40), (7, 256), (2, int8.MAX_BLOCK_SIZE + 24)], ids=str)
def test_codes_and_scales_are_those_of_layout(shape: tuple[int, int], dtype: torch.dtype, divisor: float) -> None:
    x_TK = torch.randn(shape, generator=GENERATOR).to(dtype)
    x_TK[0, :5] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5]).to(dtype)  # halves, where the largest is the divisor
    x_TK[0, 5] = divisor
    x_TK[-1] = 0 if len(x_TK) > 1 else x_TK[-1]
    codes_TK, scale_T = int8.quantize_activations(x_TK, divisor)
    wanted_TK, wanted_T1 = layout.quantize_activations(x_TK, divisor)
    assert torch.equal(codes_TK, wanted_TK)
    assert torch.equal(scale_T, wanted_T1.flatten())


def test_nan_is_not_passed_over() -> None:
    x_TK = torch.ones(3, 64)
    x_TK[0, 7], x_TK[1, 60] = torch.nan, -torch.inf
    _, scale_T = int8.quantize_activations(x_TK, 127.0)
    assert not scale_T[:2].isfinite().any()
    assert scale_T[2] == layout.quantize_activations(x_TK[2:])[1]


def test_rows_of_a_wider_tensor_are_quantized_where_they_lie() -> None:
    wide = torch.randn(5, 96, generator=GENERATOR)
    codes_TK, scale_T = int8.quantize_activations(wide[:, 32:64], 127.0)
    wanted_TK, wanted_T1 = layout.quantize_activations(wide[:, 32:64])
    assert torch.equal(codes_TK, wanted_TK)
    assert torch.equal(scale_T, wanted_T1.flatten())


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
@pytest.mark.parametrize("num_in", [256, 264], ids=["even", "uneven"])
def test_every_launch_is_exact(entry: MatmulLaunch, num_in: int) -> None:
    num_rows, num_out = entry.block_rows + 3, entry.block_out + 8
    xq_TK, q_NK, scale_T, scale_N = codes(num_rows, num_in), codes(num_out, num_in), scales(num_rows), scales(num_out)
    bias_N = torch.randn(num_out, generator=GENERATOR)
    y_TN = torch.empty(num_rows, num_out)
    int8.int8_matmul_as(entry, 80, xq_TK, scale_T, int8.pack_int8(q_NK), scale_N, bias_N, y_TN)
    assert torch.equal(y_TN, wanted(xq_TK, scale_T, q_NK, scale_N, bias_N))


@pytest.mark.parametrize("num_rows", [1, 5, 20])
def test_split_sums_are_exact(num_rows: int) -> None:
    num_out, num_in = 72, 128 * 9
    xq_TK, q_NK, scale_T, scale_N = codes(num_rows, num_in), codes(num_out, num_in), scales(num_rows), scales(num_out)
    wide = torch.zeros(num_rows, num_out + 16)
    assert launch_table.num_splits(80, 2, 2, 9) == 2
    int8.int8_matmul(xq_TK, scale_T, int8.pack_int8(q_NK), scale_N, None, wide[:, 8:-8])
    assert torch.equal(wide[:, 8:-8], wanted(xq_TK, scale_T, q_NK, scale_N, None))
    assert not wide[:, :8].any() and not wide[:, -8:].any()


def test_a_linear_is_that_of_the_cpu_backend_bit_for_bit() -> None:
    weights = LinearWeights(codes(96, 192), scales(96)[:, None], None, w8a8())
    x_TK = torch.randn(9, 192, generator=GENERATOR)
    xq_TK, scale_T = int8.quantize_activations(x_TK, 127.0)
    y_TN = torch.empty(9, 96)
    int8.int8_matmul(xq_TK, scale_T, int8.pack_int8(weights.weight_NK), weights.scale_NG.flatten(), None, y_TN)
    assert torch.equal(y_TN, ExactInt8Linear(weights, 127.0, Scratch())(x_TK))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_are_rounded_once_to_the_dtype_asked_for(dtype: torch.dtype) -> None:
    xq_TK, q_NK, scale_T, scale_N = codes(4, 64), codes(32, 64), scales(4), scales(32)
    y_TN = torch.empty(4, 32, dtype=dtype)
    int8.int8_matmul(xq_TK, scale_T, int8.pack_int8(q_NK), scale_N, None, y_TN)
    assert torch.equal(y_TN, wanted(xq_TK, scale_T, q_NK, scale_N, None).to(dtype))
