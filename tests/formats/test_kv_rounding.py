"""What each rule of a KV cache rounds to."""

import pytest
import torch

from quantpipe.formats.kv_mode import INT4, INT8, INT8_STATIC
from quantpipe.formats.kv_rounding import encode_kv, round_kv, static_scale

HEAD_DIM = 16


def random_heads(seed: int = 0) -> torch.Tensor:
    """[T, J, D] of sizes from 1e-3 to 1e3, some far from zero on average."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-3, 4, (40, 3, 1), generator=generator)
    offsets = torch.randint(-1, 2, (40, 3, 1), generator=generator)
    return (torch.randn(40, 3, HEAD_DIM, generator=generator) + offsets) * sizes


def test_int8_is_within_half_a_step_of_each_token_and_head() -> None:
    x_TJD = random_heads()
    half_step_TJ1 = x_TJD.abs().amax(-1, keepdim=True) / 127 / 2
    error_TJD = (round_kv(x_TJD, INT8) - x_TJD).abs()
    assert bool((error_TJD <= half_step_TJ1 * (1 + 1e-5)).all())
    assert bool((error_TJD.amax(-1) > half_step_TJ1[..., 0] / 4).any())


def test_int4_spends_its_sixteen_levels_between_the_smallest_and_largest_value() -> None:
    x_TJD = random_heads()
    minimum, maximum = x_TJD.aminmax(dim=-1, keepdim=True)
    # Half a step, and the rounding of scale (15 times) and minimum to float16.
    bound_TJ1 = (maximum - minimum) / 15 / 2 + 2**-10 * (maximum - minimum + minimum.abs())
    assert bool(((round_kv(x_TJD, INT4) - x_TJD).abs() <= bound_TJ1).all())
    codes, _ = encode_kv(x_TJD, INT4)
    used = torch.cat((codes & 15, codes >> 4)).unique()
    assert used.tolist() == list(range(16))


def test_int4_keeps_a_constant_head_and_a_zero_head() -> None:
    x_JD = torch.tensor([[3.5] * HEAD_DIM, [0.0] * HEAD_DIM])
    assert torch.equal(round_kv(x_JD, INT4), x_JD)


def test_int4_packs_the_first_half_of_a_head_into_the_low_bits() -> None:
    x_D = torch.arange(HEAD_DIM).float()
    codes, parameters = encode_kv(x_D, INT4)
    assert codes.tolist() == [c | (c + 8) << 4 for c in range(8)]
    assert parameters is not None and parameters.tolist() == [1.0, 0.0]


def test_static_scale_covers_what_was_seen_and_clamps_what_was_not() -> None:
    x_TJD = random_heads()
    scale_J1 = static_scale(x_TJD.abs().amax((0, 2))).unsqueeze(-1)
    assert bool(((round_kv(x_TJD, INT8_STATIC, scale_J1) - x_TJD).abs() <= scale_J1 / 2 * (1 + 1e-4)).all())
    assert torch.allclose(round_kv(1000 * x_TJD, INT8_STATIC, scale_J1).abs().amax((0, 2)), 127 * scale_J1[:, 0])


def test_static_scale_of_a_head_that_is_always_zero_is_positive() -> None:
    assert static_scale(torch.tensor([0.0, 2.54])).tolist() == pytest.approx([1 / 127, 0.02])
