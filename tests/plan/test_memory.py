"""What fits: sums of weights, keys and values, activations and process."""

from dataclasses import replace
from pathlib import Path

from planned import H100, LLAMA2_70B, LLAMA_8B, ROUND_GPU, shape_in

from quantpipe.formats.scheme import w4a16
from quantpipe.plan.memory import UTILIZATION, Load, activation_bytes, contexts_to_show, memory_at


def test_activations_follow_the_formula(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    per_token = 3 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336
    assert activation_bytes(shape, "gpu", 8) == 512 * 2 * per_token + 4 * 8 * 128256
    assert activation_bytes(shape, "cpu", 8) == 512 * 4 * per_token + 4 * 8 * 128256


def test_one_more_than_fits_would_exceed_what_is_usable(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B)
    load = Load(1, 4096)
    fitting = memory_at(shape, H100, load).num_fitting
    assert fitting > 1
    assert memory_at(shape, H100, replace(load, concurrency=fitting)).is_fitting
    assert not memory_at(shape, H100, replace(load, concurrency=fitting + 1)).is_fitting


def test_70b_fits_an_h100_in_4_bits_only(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA2_70B)
    plain, small = memory_at(shape, H100, Load(8, 4096)), memory_at(shape.in_scheme(w4a16(128)), H100, Load(8, 4096))
    assert plain.num_fitting == 0 and not plain.is_fitting
    assert small.num_fitting >= 8 and small.is_fitting
    assert small.usable_bytes == int(UTILIZATION * H100.memory_bytes)


def test_a_device_smaller_than_the_process_fits_nothing(tmp_path: Path) -> None:
    tiny = replace(ROUND_GPU, memory_bytes=1000)
    assert memory_at(shape_in(tmp_path, LLAMA_8B), tiny, Load(1, 16)).num_fitting == 0


def test_contexts_go_up_to_the_models_limit_and_hold_the_one_asked_for(tmp_path: Path) -> None:
    assert contexts_to_show(shape_in(tmp_path, LLAMA2_70B), 3000) == [512, 2048, 3000]


def test_a_quarter_of_the_context_is_output() -> None:
    load = Load(1, 4096)
    assert (load.prompt_tokens, load.output_tokens) == (3072, 1024)
    assert Load(1, 2).prompt_tokens + Load(1, 2).output_tokens == 2
    assert replace(load, given_output_tokens=96).prompt_tokens == 4000
