"""Linears that read one input may run as one; which parts, schemes and biases they have must not matter."""

import itertools

import pytest
import torch

from quantpipe.backends.cpu.linear import LinearBuilder
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.models.weights import LinearWeights

SCHEMES = {
    "none": None,
    "w4a16": w4a16(32),
    "w4a16 asymmetric": weight_only(4, 32, symmetric=False),
    "w8a16": weight_only(8, None),
    "w8a8": w8a8(),
}


def random_part(num_out: int, scheme: WeightScheme | None, has_bias: bool, seed: int) -> LinearWeights:
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(num_out, 64, generator=generator)
    bias_N = torch.randn(num_out, generator=generator) if has_bias else None
    if scheme is None:
        return LinearWeights(weight_NK, None, bias_N, None)
    if scheme.symmetric:
        scale_NG = absmax_scale(weight_NK, scheme, torch.bfloat16)
        return LinearWeights(encode(weight_NK, scale_NG, scheme), scale_NG, bias_N, scheme)
    scale_NG, zero_NG = minmax_scale(weight_NK, scheme, torch.bfloat16)
    return LinearWeights(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, bias_N, scheme, zero_NG)


@pytest.mark.parametrize(("first", "second"), list(itertools.product(SCHEMES, repeat=2)))
def test_joined_linears_equal_each_alone(first: str, second: str) -> None:
    parts = [random_part(32, SCHEMES[first], False, 0), random_part(16, SCHEMES[second], True, 1)]
    x_TK = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    joined = LinearBuilder(127.0).build(parts)
    alone = torch.cat([LinearBuilder(127.0).build([part])(x_TK) for part in parts], dim=1)
    torch.testing.assert_close(joined(x_TK), alone)
    plain = torch.cat([x_TK @ part.dequantized().T + (0 if part.bias_N is None else part.bias_N) for part in parts], 1)
    assert (alone - plain).norm() < 0.01 * plain.norm()  # int8 activations are the coarsest: 1 / 254 of the largest


def test_notes_are_one_line_per_choice() -> None:
    builder = LinearBuilder(127.0)
    for seed in range(3):
        builder.build([random_part(32, w4a16(32), False, seed)])
        builder.build([random_part(32, w8a8(), False, seed)])
        builder.build([random_part(32, None, False, seed)])
    assert [note.split(":")[0] for note in builder.notes] == ["w4a16", "w8a8"]


def test_head_is_never_rounded_to_bfloat16() -> None:
    part = random_part(32, w4a16(32), True, 0)
    x_TK = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    builder = LinearBuilder(127.0)
    expected = x_TK @ part.dequantized().T + part.bias_N
    torch.testing.assert_close(builder.build_head(part)(x_TK), expected, rtol=1e-5, atol=1e-5)
    assert builder.notes == ("lm_head: w4a16 weights are expanded to float32 for each product",)
