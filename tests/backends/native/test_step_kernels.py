"""What lies between linears and attention: gates, the most likely token, and the codes of keys and values to the bit.

Shapes: C tokens of a sequence, J KV heads, D head_dim, b tokens of a block.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from native_attention import Heads, NativeAttention, Part
from torch import Tensor

from quantpipe.backends.activations import ACTIVATIONS as FUNCTIONS
from quantpipe.backends.cpu.native.library import Library
from quantpipe.backends.cpu.native.structures import ACTIVATIONS
from quantpipe.formats.kv_mode import KV_MODES, KVRule
from quantpipe.formats.kv_rounding import encode_kv

NUM_TOKENS, BLOCK_SIZE = 20, 16
EXPONENTS = {"small": -30.0, "near one": 0.0, "large": 30.0, "tiny": -120.0}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gate_is_that_of_torch_in_float32(library: Library, instruction_set: str, name: str) -> None:
    x = torch.cat((torch.linspace(-100, 100, 4001), torch.linspace(-3, 3, 2002), torch.tensor([0.0, -0.0, 1e-30])))
    up = torch.linspace(-2, 2, len(x))
    found = x.clone()
    library.call("qp_gate_apply", ACTIVATIONS[name], found.data_ptr(), up.data_ptr(), len(x))
    expected = (FUNCTIONS[name](x.double()) * up.double()).float()
    # Where tanh is nearly -1, float64 itself loses what is left of 1 + tanh.
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-14)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gate_of_a_nan_is_one(library: Library, instruction_set: str, name: str) -> None:
    found, up = torch.full((9,), torch.nan), torch.ones(9)
    library.call("qp_gate_apply", ACTIVATIONS[name], found.data_ptr(), up.data_ptr(), 9)
    assert found.isnan().all()


@given(st.lists(st.sampled_from((-2.0, 0.0, 1.0, 1.5, -np.inf)), min_size=1, max_size=2000), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
@example([-np.inf] * 9, 0)
@example([1.0] * 1500, 1)
def test_most_likely_token_is_the_lowest_of_the_largest(
    library: Library, instruction_set: str, values: list[float], start: int
) -> None:
    logits_V = np.array([0.0] * start + values, dtype=np.float32)[start:]
    best = int(logits_V.argmax())
    expected = best if np.isfinite(logits_V[best]) else -1
    assert library.call("qp_argmax_apply", logits_V.ctypes.data, len(logits_V)) == expected


@pytest.mark.parametrize("bad", (np.nan, np.inf))
@pytest.mark.parametrize("place", (0, 7, 511, 1000, 1023, 1029))
def test_a_row_with_a_nan_or_an_infinity_has_no_most_likely_token(
    library: Library, instruction_set: str, place: int, bad: float
) -> None:
    logits_V = np.linspace(-1, 1, 1030, dtype=np.float32)
    logits_V[place] = bad
    assert library.call("qp_argmax_apply", logits_V.ctypes.data, len(logits_V)) == -1


def stored(cache: Tensor, rule: KVRule, is_key: bool, head_dim: int) -> tuple[Tensor, Tensor | None]:
    """Codes [C, .] and parameters [C, P] of the only head, of blocks in order; ``cache`` [B, bytes] is its own part."""
    width, size = rule.code_width(head_dim), rule.code_dtype.itemsize
    num_code_bytes = BLOCK_SIZE * width * size
    codes = cache[:, :num_code_bytes].contiguous().view(rule.code_dtype)
    codes = codes.view(-1, width, BLOCK_SIZE).transpose(1, 2) if is_key else codes.view(-1, BLOCK_SIZE, width)
    codes = codes.reshape(-1, width)[:NUM_TOKENS]
    if not rule.num_parameters:
        return codes, None
    parameters = cache[:, num_code_bytes:].contiguous().view(rule.parameter_dtype)
    by_kind = parameters.view(len(cache), rule.num_parameters, BLOCK_SIZE).transpose(1, 2)
    return codes, by_kind.reshape(-1, rule.num_parameters)[:NUM_TOKENS]


@pytest.mark.parametrize("spread", EXPONENTS)
@pytest.mark.parametrize("head_dim", (8, 24, 64, 80))
@pytest.mark.parametrize("kv_dtype", KV_MODES)
def test_codes_and_parameters_are_those_of_the_format_to_the_bit(
    library: Library, instruction_set: str, kv_dtype: str, head_dim: int, spread: str
) -> None:
    mode, heads = KV_MODES[kv_dtype], Heads(1, 1, head_dim, num_pairs=0)
    attention = NativeAttention(library, heads, 2, BLOCK_SIZE, kv_dtype)
    generator = torch.Generator().manual_seed(3)
    qkv_CAD = torch.randn(NUM_TOKENS, 3, head_dim, generator=generator) * 2.0 ** EXPONENTS[spread]
    qkv_CAD[4] = 0
    qkv_CAD[5] = qkv_CAD[5].abs() + 1
    attention.run([Part(0, NUM_TOKENS, (0, 1))], qkv_CAD)
    cache = torch.from_numpy(attention.cache._layers[0])
    num_key_bytes = BLOCK_SIZE * mode.key.head_bytes(head_dim)
    parts = (
        (mode.key, cache[:, :num_key_bytes], qkv_CAD[:, 1:2], attention.scales.key[0]),
        (mode.value, cache[:, num_key_bytes:], qkv_CAD[:, 2:], attention.scales.value[0]),
    )
    for rule, own, x_C1D, scale_J in parts:
        codes, parameters = encode_kv(x_C1D, rule, scale_J[:, None] if rule.is_static else None)
        found_codes, found_parameters = stored(own, rule, own is parts[0][1], head_dim)
        assert torch.equal(found_codes, codes[:, 0])
        if parameters is not None:
            assert found_parameters is not None
            assert torch.equal(found_parameters, parameters[:, 0])
