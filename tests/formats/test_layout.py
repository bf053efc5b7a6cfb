import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.formats.layout import absmax_scale, cast_scale, decode, encode, pack, quantize_activations, unpack
from quantpipe.formats.scheme import w4a16, w8a8


def test_worked_example_of_the_format_specification() -> None:
    weight_NK = torch.tensor([[-0.9, -0.5, -0.1, 0.0, 0.1, 0.3, 0.6, 0.75]])
    scheme = w4a16(8)
    scale_NG = absmax_scale(weight_NK, scheme, torch.float32)
    q_NK = encode(weight_NK, scale_NG, scheme)
    assert torch.allclose(scale_NG, torch.tensor([[0.12]]))
    assert q_NK.tolist() == [[-8, -4, -1, 0, 1, 3, 5, 6]]
    assert pack(q_NK, 4).item() & 0xFFFFFFFF == 0xEDB98740


def test_low_nibbles_come_first() -> None:
    words = pack(torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8), 4)
    assert [word & 0xFFFFFFFF for word in words.flatten().tolist()] == [0x76543210, 0xFEDCBA98]


@given(st.integers(1, 5), st.integers(1, 40), st.randoms(use_true_random=False))
def test_unpack_reverses_pack_for_any_width(rows: int, columns: int, rng: object) -> None:
    q_NK = torch.tensor(
        [[rng.randint(-8, 7) for _ in range(columns)] for _ in range(rows)],  # type: ignore[attr-defined]
        dtype=torch.int8,
    )
    assert torch.equal(unpack(pack(q_NK, 4), 4, columns), q_NK)


def test_packing_agrees_with_an_independent_reader() -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    q_NK = torch.randint(-8, 8, (6, 24), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpack_from_int32(pack(q_NK, 4), 4, torch.Size(q_NK.shape)).to(torch.int8), q_NK)


def test_every_weight_is_within_half_a_step_of_its_integer() -> None:
    weight_NK = torch.randn(16, 128, generator=torch.Generator().manual_seed(1))
    for scheme in (w4a16(32), w8a8()):
        scale_NG = absmax_scale(weight_NK, scheme, torch.float32)
        error_NK = (decode(encode(weight_NK, scale_NG, scheme), scale_NG) - weight_NK).abs()
        # absmax / (2^b - 1) / 2 leaves the positive end half a step beyond the largest integer
        assert (error_NK <= 0.5001 * scale_NG.repeat_interleave(128 // scale_NG.shape[1], 1)).all()


def test_zero_group_gets_a_positive_scale_and_stays_zero() -> None:
    weight_NK = torch.zeros(2, 64)
    weight_NK[1] = 1.0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scale_NG = absmax_scale(weight_NK, w4a16(32), dtype)
        assert (scale_NG > 0).all()
        assert torch.equal(decode(encode(weight_NK, scale_NG, w4a16(32)), scale_NG)[0], weight_NK[0])


def test_scale_beyond_float16_is_clamped_not_infinite() -> None:
    assert torch.isfinite(cast_scale(torch.tensor([1e6]), torch.float16)).all()


def test_rounding_is_half_to_even() -> None:
    q_NK = encode(torch.tensor([[0.5, 1.5, 2.5, -0.5]]), torch.ones(1, 1), w8a8())
    assert q_NK.tolist() == [[0, 2, 2, 0]]


def test_activation_rows_use_their_own_scale_and_zero_rows_stay_zero() -> None:
    q_TK, scale_T1 = quantize_activations(torch.tensor([[1.0, -2.0], [0.0, 0.0], [100.0, 50.0]]))
    assert q_TK.tolist() == [[64, -127], [0, 0], [127, 64]]
    assert torch.allclose(scale_T1.flatten(), torch.tensor([2 / 127, 1 / 127, 100 / 127]))


@pytest.mark.parametrize("overflow", [math.nan, math.inf])
def test_overflow_is_not_hidden_by_quantizing_it(overflow: float) -> None:
    q_TK, scale_T1 = quantize_activations(torch.tensor([[1.0, overflow, 2.0], [1.0, 0.5, 2.0]]))
    is_finite = (q_TK.float() * scale_T1).isfinite()
    assert not is_finite[0].any()
    assert is_finite[1].all()


def test_transformers_rule_spreads_the_range_over_255_steps() -> None:
    _, scale_T1 = quantize_activations(torch.tensor([[-1.0, 0.5]]), divisor=127.5)
    assert torch.allclose(scale_T1, torch.tensor([[2 / 255]]))
