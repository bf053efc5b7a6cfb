from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from first_block import given_block
from trained_model import divergence, quantize, text_of, with_outliers

from quantpipe.formats.scheme import w8a8, weight_only
from quantpipe.quantize.model.block_runs import run_block
from quantpipe.quantize.solvers.gptq import solve_gptq
from quantpipe.quantize.transforms.smoothquant import apply_smoothquant, smoothing_scale


@pytest.fixture(scope="module")
def loud_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_outliers(tiny_llama, tmp_path_factory.mktemp("loud"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_computes_the_same_with_norms_rounded_to_their_stored_dtype(
    random_llama: Callable[..., Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = with_outliers(random_llama(dtype), tmp_path / "loud")
    given = given_block(folder, tmp_path / "work", w8a8())
    probe = given.batches[0].first_sequence(torch.float64)
    with torch.no_grad():
        expected = run_block(given.block.double(), probe)
        given.block.float()
        records = apply_smoothquant(given)
        assert any(record.producer == "input_layernorm" for record in records)
        norm = given.block.get_parameter("input_layernorm.weight")
        assert torch.equal(norm, norm.to(dtype).float())
        assert not torch.equal(norm, given.original.get_parameter("input_layernorm.weight").float())
        found = run_block(given.block.double(), probe)
    # scales are float32, and so is the inside of a norm
    assert (found - expected).norm() < 1e-5 * (expected - probe.hidden_SLD).norm()


def test_planted_outliers_are_removed(tiny_llama: Path, loud_llama: Path, tmp_path: Path) -> None:
    calibration, held_out = text_of(tiny_llama, 8)
    nearest = divergence(loud_llama, quantize(loud_llama, tmp_path / "a", w8a8()), held_out)
    quantized = quantize(loud_llama, tmp_path / "b", w8a8(), [apply_smoothquant], calibration)
    assert divergence(loud_llama, quantized, held_out) < 0.25 * nearest
    for record in quantized.transformed:
        assert record.error_before is not None
        assert record.error_after is not None
        assert record.error_after < record.error_before if record.producer else record.reason


def test_gptq_works_on_the_transformed_weights(tiny_llama: Path, loud_llama: Path, tmp_path: Path) -> None:
    calibration, held_out = text_of(tiny_llama, 8)
    nearest = divergence(loud_llama, quantize(loud_llama, tmp_path / "a", w8a8()), held_out)
    quantized = quantize(loud_llama, tmp_path / "b", w8a8(), [apply_smoothquant], calibration, solve_gptq, "hessian")
    assert divergence(loud_llama, quantized, held_out) < 0.25 * nearest


def test_two_runs_agree_and_leave_the_random_state(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_outliers(random_llama(torch.bfloat16), tmp_path / "loud")
    state = torch.get_rng_state()
    token_ids = np.random.default_rng(0).integers(3, 128, (4, 32))
    first, second = (quantize(folder, tmp_path / name, w8a8(), [apply_smoothquant], token_ids) for name in "ab")
    assert torch.equal(torch.get_rng_state(), state)
    assert first.transformed == second.transformed
    assert first.tensors.keys() == second.tensors.keys() >= {"model.layers.1.input_layernorm.weight"}
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    assert all(torch.equal(weight.q_NK, second.weights[name].q_NK) for name, weight in first.weights.items())
    assert {tensor.dtype for tensor in first.tensors.values()} == {torch.bfloat16}


def test_only_linears_that_read_8_bit_activations_are_rescaled(
    random_llama: Callable[..., Path], tmp_path: Path
) -> None:
    folder = with_outliers(random_llama(), tmp_path / "loud")
    given = given_block(folder, tmp_path / "work", w8a8())
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        given.schemes[name] = weight_only(8, None)  # type: ignore[index]  # a dict
    records = {record.linears: record for record in apply_smoothquant(given)}
    assert records["mlp.gate_proj", "mlp.up_proj"].reason == "what it reads is not quantized"
    assert torch.equal(
        given.block.get_parameter("mlp.gate_proj.weight"), given.original.get_parameter("mlp.gate_proj.weight")
    )
    assert records["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"].producer == "input_layernorm"


def test_what_no_exponent_improves_is_left_alone(
    random_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantpipe.quantize.transforms.smoothquant.ALPHAS", (8.0,))  # far from anything that helps
    given = given_block(random_llama(), tmp_path, w8a8())
    records = apply_smoothquant(given)
    assert len(records) == 4
    assert {(record.producer, record.alpha) for record in records} == {(None, None)}
    assert all("no exponent" in str(record.reason) for record in records)
    for name, parameter in given.block.named_parameters():
        assert torch.equal(parameter, given.original.get_parameter(name)), name


def test_dead_channels_give_finite_scales() -> None:
    scale_K = smoothing_scale(torch.tensor([0.0, 1.0, 100.0]), torch.tensor([1.0, 0.0, 1.0]), 0.5)
    assert torch.isfinite(scale_K).all()
    assert (scale_K > 0).all()
    assert torch.isfinite(smoothing_scale(torch.zeros(3), torch.zeros(3), 0.5)).all()
