"""What holds for every kind of packed linear: rows keep to themselves, and what no kernel does is refused."""

import pytest
import torch
from native_linears import Case, NativeLinear, every_kind, integer_weights

from quantpipe.backends.cpu.native.library import Library, NativeError
from quantpipe.backends.cpu.native.linears import LinearSettings, make_linear
from quantpipe.formats.layout import decode


def test_rows_do_not_depend_on_what_else_is_in_the_batch_or_on_threads(library: Library, instruction_set: str) -> None:
    case = Case(70, 1088, 137, 7, True)
    for weights, activation_bits in every_kind(case):
        linear = NativeLinear(library, weights, activation_bits)
        whole_TN = linear(case.x_TK)
        assert torch.equal(whole_TN, torch.cat([linear(rows) for rows in case.x_TK.split([1, 2, 5, 9, 20, 100])]))
        assert torch.equal(whole_TN, linear(case.x_TK, num_threads=3))


def test_a_row_that_is_not_finite_spoils_itself_alone(library: Library, instruction_set: str) -> None:
    case = Case(40, 256, 9, 3, False)
    for weights, activation_bits in every_kind(case):
        linear = NativeLinear(library, weights, activation_bits)
        clean_TN, x_TK = linear(case.x_TK), case.x_TK
        x_TK[2, 17], x_TK[4, 255], x_TK[8, 0] = torch.nan, torch.inf, -torch.inf
        y_TN = linear(x_TK)
        assert not y_TN[[2, 4, 8]].isfinite().any()
        kept = [0, 1, 3, 5, 6, 7]
        assert torch.equal(y_TN[kept], clean_TN[kept])


def test_rows_of_zeros_and_of_tiny_values_stay_finite(library: Library, instruction_set: str) -> None:
    case = Case(40, 256, 3, 3, False)
    x_TK = torch.zeros(3, 256)
    x_TK[1], x_TK[2, 5] = 1e-44, torch.finfo(torch.float32).tiny
    for weights, activation_bits in every_kind(case):
        y_TN = NativeLinear(library, weights, activation_bits)(x_TK)
        assert bool((y_TN.abs() < 1e-35).all())


def test_no_rows_are_no_work(library: Library, instruction_set: str) -> None:
    case = Case(40, 256, 1, 3, False)
    for weights, activation_bits in every_kind(case):
        assert NativeLinear(library, weights, activation_bits)(torch.empty(0, 256)).shape == (0, 40)


def test_identity_gives_back_the_decoded_weights(library: Library, instruction_set: str) -> None:
    case = Case(48, 256, 1, 5, False)
    for bits in (3, 4, 8):
        weights = integer_weights(case, bits, 64, False, torch.bfloat16)
        assert weights.scale_NG is not None
        expected_NK = decode(weights.weight_NK, weights.scale_NG, weights.zero_NG)
        for activation_bits in (8, 16, 32):
            y_TN = NativeLinear(library, weights, activation_bits)(torch.eye(256))
            torch.testing.assert_close(y_TN.T, expected_NK, rtol=2e-6, atol=0)


def test_packed_weights_take_the_bits_of_their_scheme(library: Library) -> None:
    case = Case(64, 1024, 1, 0, False)
    num_weights, num_scales = 64 * 1024, 64 * 16
    for bits, dtype, expected in (
        (4, torch.bfloat16, num_weights // 2 + 2 * num_scales),
        (8, torch.bfloat16, num_weights + 2 * num_scales),
        (4, torch.float32, num_weights // 2 + 4 * num_scales),
    ):
        weights = integer_weights(case, bits, 64, True, dtype)
        handle = make_linear(library, weights, LinearSettings(127.0, 16))
        assert library.call("qp_linear_bytes", handle) == expected + 64 * 4  # and a bias
        library.call("qp_linear_free", handle)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 8, 64, 32, None, None, None, None, 16), "5 bits; use 3, 4 or 8"),
        ((4, 8, 64, 32, None, None, None, None, 4), "4-bit activations; use 8, 16 or 32"),
        ((4, 8, 64, 16, None, None, None, None, 16), "groups of 16 in 64 inputs; use a multiple of 32"),
        ((4, 8, 96, 64, None, None, None, None, 16), "groups of 64 in 96 inputs; use a multiple of 32"),
        ((4, 0, 64, 32, None, None, None, None, 16), "linear of 0 x 64: both sizes must be at least 1"),
    ],
)
def test_what_no_kernel_does_is_refused_in_one_line(
    library: Library, arguments: tuple[int | None, ...], message: str
) -> None:
    with pytest.raises(NativeError, match=message):
        library.make("qp_linear_wint", *arguments)


def test_sums_that_could_overflow_are_refused(library: Library) -> None:
    with pytest.raises(NativeError, match="at most 131071 inputs"):
        library.make("qp_linear_w8a8", 8, 131072, None, None, None, 127.0)


def test_an_unknown_instruction_set_is_refused(library: Library) -> None:
    with pytest.raises(NativeError, match="instruction set 'mmx' is not known; use one of scalar, avx2"):
        library.check("qp_isa_select", b"mmx")
