"""Expanded weights mean what the layout says, whatever their bits, and take the room of their bits."""

import pytest
import torch

from quantpipe.backends.cpu import expanded
from quantpipe.backends.cpu.expanded import ExpandedLinear
from quantpipe.backends.cpu.scratch import Scratch
from quantpipe.backends.cpu.weight_only import make_weight_only_linear
from quantpipe.formats.scheme import WEIGHT_ONLY_BITS, weight_only
from quantpipe.models.weights import LinearWeights


def random_weights(num_out: int, num_in: int, bits: int, group_size: int | None, symmetric: bool) -> LinearWeights:
    generator = torch.Generator().manual_seed(0)
    scheme = weight_only(bits, group_size, symmetric)
    q_NK, zero_NG = (
        torch.randint(scheme.q_min, scheme.q_max + 1, (num_out, width), generator=generator, dtype=torch.int8)
        for width in (num_in, scheme.num_groups(num_in))
    )
    scale_NG = torch.randn(zero_NG.shape, generator=generator).half()
    return LinearWeights(q_NK, scale_NG, None, scheme, None if symmetric else zero_NG)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, None])
@pytest.mark.parametrize("bits", WEIGHT_ONLY_BITS)
def test_identity_gives_back_the_decoded_weights(bits: int, group_size: int | None, symmetric: bool) -> None:
    weights = random_weights(24, 96, bits, group_size, symmetric)
    linear = ExpandedLinear(weights, Scratch(), torch.float32, rounds=False)
    assert torch.equal(linear(torch.eye(96)).T, weights.dequantized())


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_matrix_expanded_in_pieces_gives_every_output(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(50, 64, 8, 32, symmetric=False)
    x_TK = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(expanded, "EXPANDED_ELEMENTS", 7 * 64)
    scratch = Scratch()
    found_TN = ExpandedLinear(weights, scratch, torch.float32, rounds=False)(x_TK)
    torch.testing.assert_close(found_TN, x_TK @ weights.dequantized().T, rtol=1e-5, atol=1e-3)  # terms of up to 700
    assert scratch.matrix(0, 0).untyped_storage().nbytes() == 7 * 64 * 4


@pytest.mark.parametrize(("bits", "num_bytes"), [(3, 32 * 128 // 2), (4, 32 * 128 // 2), (8, 32 * 128)])
def test_narrow_weights_share_a_byte(bits: int, num_bytes: int) -> None:
    weights = random_weights(32, 128, bits, 32, symmetric=True)
    assert ExpandedLinear(weights, Scratch(), torch.float32, rounds=False).weight_bytes == num_bytes + 32 * 4 * 4


def test_odd_width_is_held_without_sharing_bytes() -> None:
    weights = random_weights(8, 33, 3, None, symmetric=False)
    linear = ExpandedLinear(weights, Scratch(), torch.float32, rounds=False)
    assert torch.equal(linear(torch.eye(33)).T, weights.dequantized())


@pytest.mark.parametrize("bits", [3, 8])
def test_what_has_no_kernel_says_so(bits: int) -> None:
    weights = random_weights(32, 64, bits, 32, symmetric=True)
    linear, note = make_weight_only_linear(weights, Scratch())
    assert note.startswith(f"w{bits}a16: no kernel for {bits}-bit weights here")
    x_TK = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(linear(x_TK), x_TK @ weights.dequantized().T, rtol=1e-5, atol=1e-3)
