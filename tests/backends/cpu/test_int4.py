"""4-bit linears mean what the layout says, by either path and for any number of rows."""

import pytest
import torch
from torch import Tensor

from quantpipe.backends.cpu import int4
from quantpipe.backends.cpu.int4 import Int4ExpandedLinear, Int4KernelLinear, Int4Linear
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import GROUP_SIZES, w4a16
from quantpipe.models.weights import LinearWeights


def random_weights(
    num_out: int, num_in: int, group_size: int, scale_dtype: torch.dtype = torch.bfloat16
) -> LinearWeights:
    generator = torch.Generator().manual_seed(0)
    q_NK = torch.randint(-8, 8, (num_out, num_in), generator=generator, dtype=torch.int8)
    scale_NG = (torch.rand(num_out, num_in // group_size, generator=generator) + 0.1).to(scale_dtype)
    return LinearWeights(q_NK, scale_NG, None, w4a16(group_size))


def bfloat16_product(x_TK: Tensor, weights: LinearWeights) -> Tensor:
    """The rule of both paths: activations rounded, sums in higher precision, results rounded."""
    return (x_TK.bfloat16().double() @ weights.dequantized().double().T).bfloat16().float()


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_identity_gives_back_the_decoded_weights(group_size: int) -> None:
    weights = random_weights(48, 256, group_size)
    assert weights.scale_NG is not None
    expected_NK = decode(weights.weight_NK, weights.scale_NG)
    exact = Int4ExpandedLinear(weights, Scratch(), torch.float32, rounds=False)
    assert torch.equal(exact(torch.eye(256)).T, expected_NK)
    rounded = Int4Linear(weights, Scratch(), fast_bfloat16=False)
    for rows in torch.eye(256).split(16):
        torch.testing.assert_close(rounded(rows).T, expected_NK.bfloat16().float()[:, rows.argmax(1)], rtol=0, atol=0)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("fast_bfloat16", [False, True])
def test_every_row_count_follows_one_rule(num_rows: int, group_size: int, fast_bfloat16: bool) -> None:
    weights = random_weights(80, 384, group_size)
    x_TK = torch.randn(num_rows, 384, generator=torch.Generator().manual_seed(1))
    found = Int4Linear(weights, Scratch(), fast_bfloat16)(x_TK)
    # One unit of bfloat16 where a sum lies on a rounding boundary; weights rounded to bfloat16 add their 2^-9 each.
    noise = (x_TK.abs() @ weights.dequantized().abs().T) * (2**-9 if fast_bfloat16 else 2**-20)
    distance = (found - bfloat16_product(x_TK, weights)).abs()
    assert bool((distance <= 2**-7 * found.abs() + noise).all())


def test_this_machine_runs_the_kernel_or_says_why_not() -> None:
    linear, note = int4.make_int4_linear(random_weights(32, 64, 32), Scratch())
    assert isinstance(linear, Int4Linear) == (int4.kernel_fault() is None)
    assert note.startswith("w4a16: ")


def test_weights_the_kernel_cannot_hold_are_expanded_and_reported() -> None:
    for weights, reason in (
        (random_weights(40, 64, 32), "40 output features are not a multiple of 16"),
        (random_weights(32, 64, 32, torch.float32), "scales stored as float32 do not fit bfloat16"),
    ):
        linear, note = int4.make_int4_linear(weights, Scratch())
        assert isinstance(linear, Int4ExpandedLinear)
        if int4.kernel_fault() is None:
            assert reason in note
        x_TK = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(linear(x_TK), x_TK @ weights.dequantized().T)


def test_check_rejects_a_kernel_with_its_halves_swapped() -> None:
    class Swapped(Int4KernelLinear):
        def __init__(self, weights: LinearWeights) -> None:
            flipped = LinearWeights(weights.weight_NK.flip(1), weights.scale_NG, None, weights.scheme)
            super().__init__(flipped)

    fault = int4.find_fault(Swapped, int4.kernel_cases())
    assert fault is not None and "int4 kernel, groups of 32, 1 rows: off by up to" in fault


def test_two_weights_share_a_byte() -> None:
    weights = random_weights(32, 128, 32)
    expanded = Int4ExpandedLinear(weights, Scratch(), torch.float32, rounds=False)
    assert expanded.weight_bytes == 32 * 128 // 2 + 32 * 4 * 4
