"""Steps: the bytes and operations that can be counted by hand, and what follows for times."""

from dataclasses import replace
from pathlib import Path

import pytest
from planned import GEMMA3_4B, LLAMA_8B, ROUND_CPU, ROUND_GPU, shape_in

from quantpipe.formats.scheme import w4a16, w8a8
from quantpipe.plan import weights
from quantpipe.plan.devices import Device
from quantpipe.plan.roofline import EFFICIENCY, StepCosts
from quantpipe.plan.shape import ModelShape


def costs_of(shape: ModelShape, device: Device, num_seqs: int = 4, prompt: int = 100, context: int = 200) -> StepCosts:
    return StepCosts.of(shape, device, "auto", num_seqs, prompt, context)


def test_a_decode_step_reads_weights_once_and_each_sequences_keys_and_values(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    step = costs_of(shape, ROUND_GPU).step(0, 4, 4)
    assert step.num_bytes == weights.read_bytes(shape, "gpu", 4) + 4 * 200 * (128 << 10)
    inner = sum(linear.num_weights for linear in shape.linears)
    attention = 32 * 4 * 32 * 128 * 200
    assert step.work.num_flops == pytest.approx(4 * (2 * inner + 2 * shape.lm_head.num_weights + attention))
    assert step.work.arithmetic_s == pytest.approx(step.work.num_flops / 1e12)


def test_the_bound_is_the_slower_of_reading_and_arithmetic(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    decode, prompts = costs_of(shape, ROUND_GPU).step(0, 4, 4), costs_of(shape, ROUND_GPU, 6).step(512, 0, 5)
    assert decode.bound_s(ROUND_GPU) == decode.num_bytes / 1e11 > decode.work.arithmetic_s
    assert prompts.bound_s(ROUND_GPU) == prompts.work.arithmetic_s > prompts.num_bytes / 1e11
    # Beyond the balance point arithmetic decides.
    assert decode.intensity_flops_per_byte < ROUND_GPU.balance_flops_per_byte < prompts.intensity_flops_per_byte


def test_nothing_is_expected_to_be_faster_than_its_bound(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    for device in (ROUND_GPU, ROUND_CPU):
        for step in (costs_of(shape, device).step(0, 4, 4), costs_of(shape, device).step(300, 2, 3)):
            assert step.expected_s(device) > step.bound_s(device)


def test_a_cpu_reads_and_computes_one_after_the_other(tmp_path: Path) -> None:
    step = costs_of(shape_in(tmp_path, LLAMA_8B), ROUND_CPU).step(0, 4, 4)
    own = EFFICIENCY["cpu"]
    parts_s = step.num_bytes / 1e11 / own.memory_frac + step.work.arithmetic_s / own.compute_frac
    assert step.expected_s(ROUND_CPU) == pytest.approx(parts_s + own.overhead_s)


def test_int8_activations_are_multiplied_at_the_int8_rate_and_4_bit_weights_are_not(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    plain, int8, int4 = (
        costs_of(own, ROUND_GPU).linears.arithmetic_s
        for own in (shape, shape.in_scheme(w8a8()), shape.in_scheme(w4a16()))
    )
    assert int8 == pytest.approx(plain / 2)
    assert int4 == plain


def test_windows_bound_attention(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, GEMMA3_4B)
    everything = replace(shape, attention=tuple(replace(own, window=None) for own in shape.attention))
    bounded = costs_of(shape, ROUND_GPU, 1, 8192, 8192)
    full = costs_of(everything, ROUND_GPU, 1, 8192, 8192)
    per_layer = 4 * 8 * 256
    assert bounded.decode_attention.num_flops == per_layer * (5 * 8192 + 29 * 1024)
    assert full.decode_attention.num_flops == per_layer * 34 * 8192
    seen = 1024 * 1025 // 2 + (8192 - 1024) * 1024
    assert bounded.prompt_attention.num_flops == pytest.approx(per_layer * (5 * 8193 / 2 + 29 * seen / 8192))


def test_guesses_cost_arithmetic_and_no_second_reading(tmp_path: Path) -> None:
    costs = costs_of(shape_in(tmp_path, LLAMA_8B), ROUND_GPU)
    plain, guessing = costs.step(0, 4, 4), costs.step(0, 4, 20, tokens_each=5)
    assert guessing.num_bytes == plain.num_bytes
    assert guessing.work.num_flops == pytest.approx(5 * plain.work.num_flops)
