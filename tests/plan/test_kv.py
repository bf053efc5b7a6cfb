"""The sums of record: bytes of keys and values, with grouped heads and with windows."""

from dataclasses import replace
from pathlib import Path

from planned import GEMMA3_4B, LLAMA2_70B, LLAMA_8B, MISTRAL_7B, shape_in

from quantpipe.plan import kv

GIB, KIB = 1 << 30, 1 << 10
HALF = 2  # bytes of a number in float16


def test_32_layers_of_8_heads_of_128_take_128_kib_per_token(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    assert kv.token_bytes(shape, "auto", HALF) == 128 * KIB
    assert 8 * kv.sequence_bytes(shape, "auto", HALF, 4096, 512) == 4 * GIB
    assert 16 * kv.sequence_bytes(shape, "auto", HALF, 32768, 512) == 64 * GIB


def test_grouped_heads_take_an_eighth_of_what_every_head_would(tmp_path: Path) -> None:
    every_head = shape_in(tmp_path, LLAMA2_70B | {"num_key_value_heads": 64})
    all_bytes = 32 * kv.sequence_bytes(every_head, "auto", HALF, 2048, 512)
    assert round(all_bytes / 1e9) == 172
    grouped = shape_in(tmp_path, LLAMA2_70B)
    assert 8 * 32 * kv.sequence_bytes(grouped, "auto", HALF, 2048, 512) == all_bytes


def test_int8_keys_and_values_take_a_byte_each_and_a_scale_per_head(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    assert kv.token_bytes(shape, "int8_per_token_head", HALF) == 32 * 2 * 8 * (128 + 4)


def test_a_window_in_every_layer_bounds_what_a_sequence_holds(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, MISTRAL_7B)
    assert kv.held_tokens(shape, 2048, 512) == 2048
    at_most = kv.held_tokens(shape, 32768, 512)
    assert 4096 + 511 <= at_most <= 4096 + 512 + 16
    assert kv.held_tokens(shape, 131072, 512) == at_most


def test_windows_in_some_layers_bound_what_is_read_but_not_what_is_held(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, GEMMA3_4B)
    windows = [own.window for own in shape.attention]
    assert windows.count(None) == 5 and windows.count(1024) == 29  # every sixth of 34 layers sees everything
    assert kv.held_tokens(shape, 32768, 512) == 32768
    per_layer = 2 * 4 * 256 * HALF
    assert kv.read_bytes(shape, "auto", HALF, 32768) == per_layer * (5 * 32768 + 29 * 1024)
    assert kv.read_bytes(shape, "auto", HALF, 512) == per_layer * 34 * 512


def test_a_sequence_takes_whole_blocks(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    assert kv.held_tokens(shape, 17, 512) == 32
    assert kv.held_tokens(replace(shape, attention=shape.attention[:1]), 16, 512) == 16
