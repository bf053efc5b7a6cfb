"""Requests that come together: who gets a first token when, on costs that are the same for every step."""

from pathlib import Path

import pytest
from planned import LLAMA_8B, ROUND_GPU, shape_in

from quantpipe.plan.burst import play_burst, times_at
from quantpipe.plan.memory import Load
from quantpipe.plan.roofline import EFFICIENCY, StepCosts, Work

READING_S = 0.07
STEP_S = READING_S / EFFICIENCY["gpu"].memory_frac + EFFICIENCY["gpu"].overhead_s


def even_costs() -> StepCosts:
    """Every step takes ``STEP_S``, whatever it holds."""
    num_bytes = READING_S * ROUND_GPU.bandwidth_bytes_per_s
    return StepCosts(ROUND_GPU, num_bytes, num_bytes, 0.0, Work(), Work(), Work(), Work())


def test_one_request_waits_for_the_chunks_of_its_prompt() -> None:
    times = play_burst(even_costs(), 1, 1100, 10)
    assert times.ttft_s == pytest.approx(3 * STEP_S)  # 512 + 512 + 76 tokens
    assert times.tpot_s == pytest.approx(STEP_S)
    assert times.output_tok_s == pytest.approx(10 / (12 * STEP_S))


def test_short_prompts_share_a_step() -> None:
    times = play_burst(even_costs(), 8, 64, 5)
    assert times.ttft_s == pytest.approx(STEP_S)
    assert times.output_tok_s == pytest.approx(40 / (5 * STEP_S))


def test_sequences_that_decode_leave_less_for_prompts() -> None:
    """Of 1,024 tokens that end the second of three prompts 1,023 are read after two steps, as one sequence decodes."""
    times = play_burst(even_costs(), 3, 512, 50)
    assert times.ttft_s == pytest.approx(3 * STEP_S)


def test_one_token_each_ends_with_the_prompt() -> None:
    times = play_burst(even_costs(), 2, 512, 1)
    assert times.output_tok_s == pytest.approx(2 / (2 * STEP_S))


def test_a_larger_batch_gives_more_tokens_and_later_ones(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    few, many = (times_at(shape, ROUND_GPU, Load(number, 1024)) for number in (1, 16))
    assert many.output_tok_s > few.output_tok_s
    assert many.ttft_s > few.ttft_s
    assert many.tpot_s > few.tpot_s
