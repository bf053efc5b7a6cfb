"""Levers: each against the load without it, sorted by what it gains."""

from dataclasses import replace
from pathlib import Path

from planned import H100, LLAMA2_70B, LLAMA_8B, shape_in

from quantpipe.formats.scheme import w4a16
from quantpipe.plan.levers import INT8_KV, Lever, levers
from quantpipe.plan.memory import Load
from quantpipe.plan.shape import ModelShape


def by_name(shape: ModelShape, load: Load) -> dict[str, Lever]:
    return {lever.name: lever for lever in levers(shape, H100, load)}


def test_levers_are_sorted_by_gain(tmp_path: Path) -> None:
    found = levers(shape_in(tmp_path, LLAMA_8B), H100, Load(8, 4096))
    gains = [lever.gain_ratio for lever in found]
    assert len(found) == 5 and gains == sorted(gains, reverse=True)


def test_few_sequences_gain_most_from_smaller_weights_or_company(tmp_path: Path) -> None:
    found = by_name(shape_in(tmp_path, LLAMA_8B), Load(1, 512))
    assert found["weights in 4 bits"].gain_ratio > 1.5
    assert found["larger batch"].gain_ratio > 2
    assert found["keys and values in int8"].gain_ratio < 1.1


def test_long_contexts_gain_from_smaller_keys_and_values(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    short, long = (by_name(shape, Load(8, context))["keys and values in int8"] for context in (512, 32768))
    assert long.gain_ratio > short.gain_ratio
    assert long.num_fitting > by_name(shape, Load(8, 32768))["speculation"].num_fitting


def test_what_is_done_already_gains_nothing(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B).in_scheme(w4a16())
    found = by_name(shape, Load(8, 4096, INT8_KV))
    for name in ("weights in 4 bits", "keys and values in int8"):
        assert found[name].gain_ratio == 1


def test_a_batch_does_not_grow_beyond_what_fits(tmp_path: Path) -> None:
    found = by_name(shape_in(tmp_path, LLAMA2_70B), Load(8, 4096))["larger batch"]
    assert found.gain_ratio == 1 and found.assumption == "no room for more"


def test_a_known_half_of_the_prompt_halves_the_wait_and_not_the_memory(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    load = Load(1, 4096)
    found = by_name(shape, load)
    assert found["prefix cache"].ttft_s < 0.6 * found["speculation"].ttft_s
    assert found["prefix cache"].memory_bytes == found["speculation"].memory_bytes


def test_speculation_pays_less_where_arithmetic_is_short(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    slow = replace(H100, float_flops_per_s=1e13, weight_only_flops_per_s=1e13)
    fast_gain = by_name(shape, Load(8, 1024))["speculation"].gain_ratio
    slow_gain = next(own for own in levers(shape, slow, Load(8, 1024)) if own.name == "speculation").gain_ratio
    assert fast_gain > 1.2 > slow_gain
