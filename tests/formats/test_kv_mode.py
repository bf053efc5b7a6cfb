"""The bytes that each KV cache mode takes."""

import pytest

from quantpipe.errors import RecipeError
from quantpipe.formats.kv_mode import KV_MODES, kv_mode


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("auto", 2 * 4 * 64),
        ("int8_per_token_head", 2 * (64 + 4)),
        ("int8_static", 2 * 64),
        ("k_int8_v_int4", 64 + 4 + 32 + 4),
        ("int4_per_token_head", 2 * (32 + 4)),
    ],
)
def test_bytes_of_a_token(name: str, num_bytes: int) -> None:
    assert KV_MODES[name].token_bytes(num_kv_heads=3, head_dim=64) == 3 * num_bytes


def test_unrounded_keys_and_values_take_what_the_compute_dtype_does() -> None:
    assert KV_MODES["auto"].token_bytes(num_kv_heads=8, head_dim=128, compute_bytes=2) == 4096
    assert KV_MODES["int8_static"].token_bytes(num_kv_heads=8, head_dim=128, compute_bytes=2) == 2048


def test_unknown_mode_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match=r"kv_dtype: unknown 'int8_statik'; did you mean 'int8_static'\?"):
        kv_mode("int8_statik", "kv_dtype")
