"""4-bit linears mean what the layout says, by either path and for any number of rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantpipe.backends.cpu import int4
from quantpipe.backends.cpu.expanded import ExpandedLinear
from quantpipe.backends.cpu.int4 import Int4KernelLinear, Int4Linear
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.formats.scheme import GROUP_SIZES, weight_only
from quantpipe.models.weights import LinearWeights


def random_weights(
    num_out: int,
    num_in: int,
    group_size: int | None,
    scale_dtype: torch.dtype = torch.bfloat16,
    symmetric: bool = True,
    bits: int = 4,
) -> LinearWeights:
    """Over the full range of integers, zero points and signs of scales."""
    generator = torch.Generator().manual_seed(0)
    scheme = weight_only(bits, group_size, symmetric)
    q_NK, zero_NG = (
        torch.randint(scheme.q_min, scheme.q_max + 1, (num_out, width), generator=generator, dtype=torch.int8)
        for width in (num_in, scheme.num_groups(num_in))
    )
    sign_NG = torch.randint(2, zero_NG.shape, generator=generator) * 2 - 1
    scale_NG = ((torch.rand(zero_NG.shape, generator=generator) + 0.1) * sign_NG).to(scale_dtype)
    return LinearWeights(q_NK, scale_NG, None, scheme, None if symmetric else zero_NG)


def bfloat16_product(x_TK: Tensor, weights: LinearWeights) -> Tensor:
    """The rule of both paths: activations rounded, sums in higher precision, results rounded."""
    return (x_TK.bfloat16().double() @ weights.dequantized().double().T).bfloat16().float()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, None])
def test_identity_gives_back_the_decoded_weights(group_size: int | None, symmetric: bool) -> None:
    weights = random_weights(48, 256, group_size, symmetric=symmetric)
    expected_NK = weights.dequantized()
    exact = ExpandedLinear(weights, Scratch(), torch.float32, rounds=False)
    assert torch.equal(exact(torch.eye(256)).T, expected_NK)
    rounded = Int4Linear(weights, Scratch(), fast_bfloat16=False)
    # Rounded to bfloat16; with zero points weights may be as well, and 2^-9 of up to 8 steps are added afterwards.
    rtol, atol = (0.0, 0.0) if symmetric else (2**-7, 8 * 2**-9 * 2**-9 * 1.1)
    for rows in torch.eye(256).split(16):  # type: ignore[no-untyped-call]
        found_NK, wanted_NK = rounded(rows).T, expected_NK.bfloat16().float()[:, rows.argmax(1)]
        torch.testing.assert_close(found_NK, wanted_NK, rtol=rtol, atol=atol)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, None])
@pytest.mark.parametrize("fast_bfloat16", [False, True])
def test_every_row_count_follows_one_rule(
    num_rows: int, group_size: int | None, symmetric: bool, fast_bfloat16: bool
) -> None:
    weights = random_weights(80, 384, group_size, symmetric=symmetric)
    x_TK = torch.randn(num_rows, 384, generator=torch.Generator().manual_seed(1)) + 1
    found = Int4Linear(weights, Scratch(), fast_bfloat16)(x_TK)
    # One unit of bfloat16 where a sum lies on a rounding boundary; weights rounded to bfloat16 add their 2^-9 each.
    noise = (x_TK.abs() @ weights.dequantized().abs().T) * (2**-9 if fast_bfloat16 else 2**-19)
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
        (random_weights(32, 48, None), "48 input features cannot be cut into its groups"),
    ):
        linear, note = int4.make_int4_linear(weights, Scratch())
        assert isinstance(linear, ExpandedLinear)
        if int4.kernel_fault() is None:
            assert reason in note
        x_TK = torch.randn(3, weights.weight_NK.shape[1], generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(linear(x_TK), x_TK @ weights.dequantized().T)


def test_check_rejects_a_kernel_with_its_halves_swapped() -> None:
    class Swapped(Int4KernelLinear):
        def __init__(self, weights: LinearWeights) -> None:
            flipped = replace(weights, weight_NK=weights.weight_NK.flip(1))
            super().__init__(flipped)

    fault = int4.find_fault(Swapped, int4.kernel_cases())
    assert fault is not None and "int4 kernel, w4a16 g32, 1 rows: off by up to" in fault
