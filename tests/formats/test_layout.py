import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.formats.artifact_writer import QuantWeight
from quantpipe.formats.layout import (
    absmax_scale,
    cast_scale,
    decode,
    encode,
    minmax_scale,
    pack,
    quantize_activations,
    unpack,
)
from quantpipe.formats.scheme import WEIGHT_ONLY_BITS, w4a16, w8a8, weight_only


def random_integers(bits: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-half, half, (rows, columns), dtype=torch.int8, generator=generator)


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


@given(st.sampled_from(WEIGHT_ONLY_BITS), st.integers(1, 5), st.integers(1, 70), st.randoms(use_true_random=False))
def test_unpack_reverses_pack_for_any_width(bits: int, rows: int, columns: int, rng: random.Random) -> None:
    q_NK = random_integers(bits, rows, columns, rng.randint(0, 1000))
    assert torch.equal(unpack(pack(q_NK, bits), bits, columns), q_NK)


@pytest.mark.parametrize("bits", WEIGHT_ONLY_BITS)
@pytest.mark.parametrize("columns", [24, 32, 96, 100])
def test_packing_agrees_with_an_independent_reader_and_writer(bits: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    q_NK = random_integers(bits, 6, columns, seed=columns)
    assert torch.equal(pack(q_NK, bits), pack_to_int32(q_NK, bits))
    assert torch.equal(unpack_from_int32(pack(q_NK, bits), bits, torch.Size(q_NK.shape)).to(torch.int8), q_NK)


def test_three_bit_values_run_across_words() -> None:
    """Value 10 has its lowest two bits at the end of the first word and its highest at the start of the second."""
    q_NK = torch.full((1, 32), -4, dtype=torch.int8)
    q_NK[0, 10] = 1  # stored as 5, binary 101
    assert [word & 0xFFFFFFFF for word in pack(q_NK, 3)[0].tolist()] == [0b01 << 30, 0b1, 0]


@pytest.mark.parametrize("bits", WEIGHT_ONLY_BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_stored_tensors_mean_what_an_independent_reader_makes_of_them(bits: int, symmetric: bool) -> None:
    """The oracle takes every field out of the bit stream by itself; zero points include zero and both ends."""
    scheme = weight_only(bits, 32, symmetric)
    q_NK = random_integers(bits, 5, 64, seed=bits)
    scale_NG = torch.rand(5, 2, generator=torch.Generator().manual_seed(3)) + 0.1
    ends = [scheme.q_min, -1, 0, 1, scheme.q_max]
    zero_NG = None if symmetric else torch.tensor([ends, ends[::-1]], dtype=torch.int8).T.contiguous()
    stored = QuantWeight(q_NK, scale_NG, scheme, zero_NG).stored_tensors("m")
    specs = scheme.tensors(5, 64, "F32")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        f"m.{suffix}": spec.shape for suffix, spec in specs.items()
    }

    def field(words: list[int], index: int) -> int:
        stream = sum((word & 0xFFFFFFFF) << (32 * position) for position, word in enumerate(words))
        return (stream >> (index * bits)) % 2**bits - 2 ** (bits - 1)

    expected_NK = torch.empty(5, 64)
    for n in range(5):
        for k in range(64):
            zero = 0
            if not symmetric:
                zero = field(stored["m.weight_zero_point"][:, k // 32].tolist(), n)
            q = field(stored["m.weight_packed"][n].tolist(), k)
            expected_NK[n, k] = (q - zero) * scale_NG[n, k // 32]
    assert torch.equal(QuantWeight(q_NK, scale_NG, scheme, zero_NG).dequantized(), expected_NK)


@pytest.mark.parametrize("bits", WEIGHT_ONLY_BITS)
def test_asymmetric_range_covers_every_weight_and_keeps_zero(bits: int) -> None:
    scheme = weight_only(bits, 32, symmetric=False)
    weight_NK = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    weight_NK[:, ::7] = 0.0
    weight_NK[4:] *= -1
    weight_NK[7] = 0.0
    scale_NG, zero_NG = minmax_scale(weight_NK, scheme, torch.float32)
    found_NK = decode(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, zero_NG)
    assert ((found_NK - weight_NK).abs() <= 0.501 * scale_NG.repeat_interleave(32, 1)).all()
    assert torch.equal(found_NK[:, ::7], torch.zeros(8, 10))


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
