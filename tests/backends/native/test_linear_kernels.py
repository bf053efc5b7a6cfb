"""Packed linears against exact integers and the reference's rules, in every instruction set of this CPU.

Shapes: T rows, N out_features, K in_features, G groups along K.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_linears import Case, NativeLinear, cases, integer_weights, magnitude, plus_bias, w8a8_weights

from quantpipe.backends.cpu.native.library import Library
from quantpipe.formats.layout import quantize_activations
from quantpipe.formats.scheme import w8a8
from quantpipe.models.weights import LinearWeights


@settings(max_examples=30, deadline=None)
@given(case=cases(st.integers(1, 1300)), divisor=st.sampled_from([127.0, 127.5]))
def test_w8a8_equals_the_reference_bit_for_bit(
    library: Library, instruction_set: str, case: Case, divisor: float
) -> None:
    weights = w8a8_weights(case)
    assert weights.scale_NG is not None
    xq_TK, scale_T1 = quantize_activations(case.x_TK, divisor)
    sums_TN = (xq_TK.double() @ weights.weight_NK.double().T).float()
    expected_TN = plus_bias(sums_TN * weights.scale_NG.float().T * scale_T1, case.bias_N)
    assert torch.equal(NativeLinear(library, weights, divisor=divisor)(case.x_TK), expected_TN)


@settings(max_examples=30, deadline=None)
@given(
    case=cases(st.integers(1, 10).map(lambda n: 128 * n)),
    bits=st.sampled_from([3, 4, 8]),
    group_size=st.sampled_from([32, 64, 128, None]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    activation_bits=st.sampled_from([8, 16, 32]),
)
def test_weight_only_products_are_as_good_as_their_activations(
    library: Library,
    instruction_set: str,
    case: Case,
    bits: int,
    group_size: int | None,
    symmetric: bool,
    scale_dtype: torch.dtype,
    activation_bits: int,
) -> None:
    weights = integer_weights(case, bits, group_size, symmetric, scale_dtype)
    y_TN = NativeLinear(library, weights, activation_bits)(case.x_TK)
    weight_NK = weights.dequantized()
    expected_TN = plus_bias(case.x_TK.double() @ weight_NK.double().T, case.bias_N)
    # Half a step of the largest of each group (at most 3 * 5 sigma, 127 or 32639 steps), and float32 sums beyond.
    step = {8: 15 / 127 / 2, 16: 15 / 32639 / 2, 32: 0.0}[activation_bits]
    tolerance_TN = step * weight_NK.double().abs().sum(1) + 2e-6 * magnitude(case.x_TK, weight_NK)
    assert bool(((y_TN - expected_TN).abs() <= tolerance_TN).all())


@settings(max_examples=15, deadline=None)
@given(case=cases(st.integers(1, 10).map(lambda n: 128 * n)), bits=st.sampled_from([4, 8]), symmetric=st.booleans())
@pytest.mark.parametrize("activation_bits", [8, 16])
def test_integer_sums_of_groups_are_exact(
    library: Library, instruction_set: str, case: Case, bits: int, symmetric: bool, activation_bits: int
) -> None:
    """Activations that are whole steps lose nothing; with scales of one neither do results of less than 2^24."""
    weights = integer_weights(case, bits, 64, symmetric, torch.float32)
    assert weights.scale_NG is not None
    weights = LinearWeights(weights.weight_NK, torch.ones_like(weights.scale_NG), None, weights.scheme, weights.zero_NG)
    largest = 127 if activation_bits == 8 else 32639
    x_TK = case.integers(-127, 127, case.num_rows, case.num_in).float()
    x_TK[:, ::32] = largest
    steps_NK = weights.dequantized().double()
    expected_TN = x_TK.double() @ steps_NK.T
    y_TN = NativeLinear(library, weights, activation_bits)(x_TK).double()
    # The integer of each group and the sum that it is added to are rounded to float32's 24 bits.
    num_roundings = 1 + weights.scale_NG.shape[1]
    tolerance_TN = num_roundings * 2.0**-24 * (x_TK.double().abs() @ steps_NK.abs().T)
    if activation_bits == 8 and bits == 4:
        assert torch.equal(y_TN, expected_TN)
    assert bool(((y_TN - expected_TN).abs() <= tolerance_TN).all())


@settings(max_examples=30, deadline=None)
@given(case=cases(st.integers(1, 1300)), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_floating_point_weights_give_float32_products(
    library: Library, instruction_set: str, case: Case, dtype: torch.dtype
) -> None:
    weights = LinearWeights(case.randn(case.num_out, case.num_in).to(dtype), None, case.bias_N, None)
    y_TN = NativeLinear(library, weights)(case.x_TK)
    expected_TN = plus_bias(case.x_TK.double() @ weights.weight_NK.double().T, case.bias_N)
    assert bool(((y_TN - expected_TN).abs() <= 2e-6 * magnitude(case.x_TK, weights.weight_NK)).all())


@settings(max_examples=20, deadline=None)
@given(case=cases(st.integers(1, 8).map(lambda n: 128 * n)), activation_bits=st.sampled_from([8, 16]))
def test_instruction_sets_agree_bit_for_bit_on_integers(
    library: Library, instruction_set: str, case: Case, activation_bits: int
) -> None:
    weights = integer_weights(case, 4, 64, False, torch.bfloat16)
    linear = NativeLinear(library, weights, activation_bits)
    found_TN = linear(case.x_TK)
    library.check("qp_isa_select", b"scalar")
    try:
        assert torch.equal(linear(case.x_TK), found_TN)
    finally:
        library.check("qp_isa_select", instruction_set.encode())


def test_sums_beyond_24_bits_are_exact(library: Library, instruction_set: str) -> None:
    q_NK = torch.full((33, 8192), 127, dtype=torch.int8)
    q_NK[1], q_NK[2, ::2] = -128, -128
    x_TK = torch.full((7, 8192), 127.0)
    x_TK[3, ::2] = -127
    expected_TN = (x_TK.double() @ q_NK.double().T).float()
    weights = LinearWeights(q_NK, torch.ones(33, 1), None, w8a8())
    assert torch.equal(NativeLinear(library, weights)(x_TK), expected_TN)
