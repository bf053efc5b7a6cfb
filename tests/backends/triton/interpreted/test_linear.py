"""Linears as the executor calls them, in the interpreter."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.cpu.int8 import ExactInt8Linear
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.backends.triton.linear import TritonLinear, build_linear
from quantpipe.errors import QuantpipeError
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale, quantize_activations
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.models.weights import LinearWeights

GENERATOR = torch.Generator().manual_seed(0)
CPU = torch.device("cpu")
SCHEMES = [None, w8a8(), w4a16(64), weight_only(3, None), weight_only(4, 32, False), weight_only(8, 128, False)]


def weights(scheme: WeightScheme | None, num_out: int, has_bias: bool = False, num_in: int = 128) -> LinearWeights:
    weight_NK = torch.randn(num_out, num_in, generator=GENERATOR) * 0.1
    bias_N = torch.randn(num_out, generator=GENERATOR) if has_bias else None
    if scheme is None:
        return LinearWeights(weight_NK.bfloat16(), None, bias_N, None)
    if scheme.symmetric:
        scale_NG, zero_NG = absmax_scale(weight_NK, scheme, torch.bfloat16), None
    else:
        scale_NG, zero_NG = minmax_scale(weight_NK, scheme, torch.bfloat16)
    return LinearWeights(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, bias_N, scheme, zero_NG)


def build(*parts: LinearWeights, dtype: torch.dtype = torch.float32) -> TritonLinear:
    return build_linear(parts, CPU, dtype, 127.0)


def rows(num_rows: int, num_in: int = 128) -> Tensor:
    return torch.randn(num_rows, num_in, generator=GENERATOR)


def expected(x_TK: Tensor, part: LinearWeights) -> Tensor:
    """What the reference backend computes, in float64."""
    x_TK = x_TK.double()
    if part.scheme is not None and part.scheme.activation_bits is not None:
        codes_TK, scale_T1 = quantize_activations(x_TK.float())
        x_TK = codes_TK.double() * scale_T1.double()
    y_TN = x_TK @ part.dequantized().double().T
    return y_TN if part.bias_N is None else y_TN + part.bias_N.double()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: "dense" if scheme is None else scheme.label)
def test_linears_that_share_an_input_are_one_with_their_outputs_in_order(
    scheme: WeightScheme | None, num_rows: int
) -> None:
    parts = [weights(scheme, 32), weights(scheme, 16, has_bias=True), weights(scheme, 24)]
    x_TK = rows(num_rows)
    y_TN = build(*parts)(x_TK)
    wanted_TN = torch.cat([expected(x_TK, part) for part in parts], dim=1)
    torch.testing.assert_close(y_TN.double(), wanted_TN, rtol=1e-5, atol=1e-5)


def test_schemes_that_differ_are_multiplied_one_by_one() -> None:
    parts = [weights(w8a8(), 16), weights(w4a16(64), 24, has_bias=True), weights(None, 8), weights(w8a8(), 8)]
    x_TK = rows(3)
    linear = build(*parts)
    assert not linear.accepts_quantized
    wanted_TN = torch.cat([expected(x_TK, part) for part in parts], dim=1)
    torch.testing.assert_close(linear(x_TK).double(), wanted_TN, rtol=1e-5, atol=1e-5)


def test_codes_may_be_given_instead_of_activations() -> None:
    parts = [weights(w8a8(), 16), weights(w8a8(), 24, has_bias=True)]
    x_TK, linear = rows(5), build(*parts)
    codes_TK, scale_T1 = quantize_activations(x_TK)
    assert linear.accepts_quantized
    assert torch.equal(linear.from_quantized(codes_TK, scale_T1.flatten(), torch.float32), linear(x_TK))


def test_8_bit_linears_are_those_of_the_cpu_backend_bit_for_bit() -> None:
    part = weights(w8a8(), 40, num_in=200)
    x_TK = rows(6, 200)
    assert torch.equal(build(part)(x_TK), ExactInt8Linear(part, 127.0, Scratch())(x_TK))


@pytest.mark.parametrize("scheme", [None, w8a8(), w4a16(64)], ids=["dense", "w8a8", "w4a16"])
def test_logits_are_not_rounded_to_the_dtype_of_activations(scheme: WeightScheme | None) -> None:
    part, x_TK = weights(scheme, 24, has_bias=True), rows(4).bfloat16()
    linear = build(part, dtype=torch.bfloat16)
    logits_TN = linear(x_TK, torch.float32)
    torch.testing.assert_close(logits_TN.double(), expected(x_TK, part), rtol=1e-5, atol=1e-5)
    assert torch.equal(linear(x_TK), logits_TN.bfloat16())


def test_weight_bytes_are_what_is_held() -> None:
    assert build(weights(None, 32), dtype=torch.float16).weight_bytes == 32 * 128 * 2
    assert build(weights(w8a8(), 32)).weight_bytes == 32 * 128 + 32 * 4
    assert build(weights(w4a16(64), 32)).weight_bytes == 32 * 64 + 32 * 2 * 2
    assert build(weights(weight_only(8, 128, False), 32, True)).weight_bytes == 32 * 128 + 32 * 2 + 32 + 32 * 4


def test_a_scheme_without_a_kernel_is_refused_before_anything_is_moved() -> None:
    part = LinearWeights(torch.zeros(8, 48, dtype=torch.int8), torch.ones(8, 3), None, weight_only(4, 16))
    with pytest.raises(QuantpipeError, match="has no kernel for w4a16 g16 weights in groups of 16; "):
        build(part)
