import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from quantpipe.formats.scheme import w8a8
from quantpipe.quantize import TRANSFORMS
from quantpipe.quantize.block_runs import Batch, capture_block_inputs, run_block
from quantpipe.quantize.discover import find_blocks, find_targets
from quantpipe.quantize.fake_quant import fake_quantize, fake_quantized_logits
from quantpipe.quantize.gptq import solve_gptq
from quantpipe.quantize.loading import load_base_model
from quantpipe.quantize.rtn import solve_rtn
from quantpipe.quantize.sequential import QuantizedModel, SolverSettings, quantize_blocks
from quantpipe.quantize.smoothquant import _Activations, apply_smoothquant, exact_scale, smoothing_scale
from quantpipe.quantize.transform import TransformInput
from quantpipe.recipe import schema
from quantpipe.report import no_progress


def quantize(model: nn.Module, token_ids: npt.NDArray[np.int64] | None, **settings: SolverSettings) -> QuantizedModel:
    blocks = find_blocks(model)
    targets = find_targets(model, blocks, ["lm_head"], w8a8())
    solver = solve_gptq if settings else solve_rtn
    transforms = [] if token_ids is None else [apply_smoothquant]
    return quantize_blocks(
        model, blocks, targets, w8a8(), solver, settings.get("gptq"), token_ids, no_progress, transforms
    )


def tokens_of(tiny_llama: Path, num_sequences: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Calibration and held-out windows of a text like those the model was trained on."""
    import json.decoder as source

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(tiny_llama)(Path(str(source.__file__)).read_text()).input_ids
    windows = np.array(ids[: (num_sequences + 2) * 128], dtype=np.int64).reshape(-1, 128)
    return windows[:-2], windows[-2:]


def plant_outliers(model: nn.Module, factor: float = 30.0) -> None:
    """Make one channel of each norm's output loud; the linears that read it undo that, so the function is the same."""
    for block in find_blocks(model).blocks:
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            block.get_parameter(f"{norm}.weight").data[5] *= factor
            for reader in readers:
                block.get_parameter(f"{reader}.weight").data[:, 5] /= factor


def divergence(model: nn.Module, quantized: QuantizedModel, token_ids: npt.NDArray[np.int64]) -> float:
    simulated = copy.deepcopy(model)
    with torch.no_grad():
        expected = fake_quantized_logits(copy.deepcopy(model).float(), {}, token_ids, 127.0).log_softmax(-1)
        fake_quantize(simulated, quantized)
        found = fake_quantized_logits(simulated, quantized.weights, token_ids, 127.0).log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def given_block(model: nn.Module) -> tuple[TransformInput, Batch]:
    blocks = find_blocks(model)
    token_ids = np.random.default_rng(0).integers(3, 128, (4, 16))
    with torch.no_grad():
        batches = capture_block_inputs(model, blocks, token_ids)
    block = copy.deepcopy(blocks.blocks[0]).float()
    linears = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    return TransformInput(block, blocks.blocks[0], linears, batches, dict.fromkeys(linears, w8a8())), batches[0]


def test_table_of_transforms_equals_what_recipes_may_name() -> None:
    assert set(TRANSFORMS) == set(schema.TRANSFORMS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_computes_the_same_with_norms_rounded_to_their_stored_dtype(
    random_llama: Callable[..., Path], dtype: torch.dtype
) -> None:
    model = load_base_model(random_llama(dtype))
    plant_outliers(model)
    given, batch = given_block(model)
    probe = batch.first_sequence(torch.float64)
    with torch.no_grad():
        expected = run_block(copy.deepcopy(given.block).double(), probe)
    records = apply_smoothquant(given)
    assert any(record.producer == "input_layernorm" for record in records)
    norm = given.block.get_parameter("input_layernorm.weight")
    assert torch.equal(norm, norm.to(dtype).float())
    assert not torch.equal(norm, given.original.get_parameter("input_layernorm.weight").float())
    with torch.no_grad():
        found = run_block(given.block.double(), probe)
    # scales are float32, and so is the inside of a norm
    assert (found - expected).norm() < 1e-5 * (expected - probe.hidden_SLD).norm()


def test_planted_outliers_are_removed(tiny_llama: Path) -> None:
    model = load_base_model(tiny_llama)
    plant_outliers(model)
    calibration, held_out = tokens_of(tiny_llama, 8)
    nearest = divergence(model, quantize(model, None), held_out)
    smoothed = divergence(model, quantize(model, calibration), held_out)
    assert smoothed < 0.25 * nearest


def test_gptq_works_on_the_transformed_weights(tiny_llama: Path) -> None:
    model = load_base_model(tiny_llama)
    plant_outliers(model)
    calibration, held_out = tokens_of(tiny_llama, 8)
    settings = SolverSettings(damp_frac=0.01, sequential=True, propagate_quantized=False)
    nearest = divergence(model, quantize(model, None), held_out)
    assert divergence(model, quantize(model, calibration, gptq=settings), held_out) < 0.25 * nearest


def test_two_runs_agree_and_the_base_model_is_left_as_it_was(random_llama: Callable[..., Path]) -> None:
    model = load_base_model(random_llama(torch.bfloat16))
    plant_outliers(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    token_ids = np.random.default_rng(0).integers(3, 128, (4, 32))
    first, second = (quantize(model, token_ids) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert first.transformed == second.transformed
    assert first.tensors.keys() == second.tensors.keys() >= {"model.layers.1.input_layernorm.weight"}
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    assert all(torch.equal(weight.q_NK, second.weights[name].q_NK) for name, weight in first.weights.items())
    assert {tensor.dtype for tensor in first.tensors.values()} == {torch.bfloat16}


def test_what_no_exponent_improves_is_left_alone(
    random_llama: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantpipe.quantize.smoothquant.ALPHAS", (8.0,))  # far from anything that helps
    given, _ = given_block(load_base_model(random_llama()))
    records = apply_smoothquant(given)
    assert len(records) == 4
    assert {(record.producer, record.alpha) for record in records} == {(None, None)}
    assert all("no exponent" in str(record.reason) for record in records)
    for name, parameter in given.block.named_parameters():
        assert torch.equal(parameter, given.original.get_parameter(name)), name


def test_the_first_token_is_not_sampled_and_counts_no_more_than_the_loudest_other() -> None:
    activations = _Activations(3, sampled_per_sequence=4)
    x_SLK = torch.tensor([[[900.0, 0.0, 1.0], [0.5, 4.0, 0.0], [-1.0, 2.0, 0.25]]])
    activations.update(x_SLK)
    assert torch.equal(activations.sample_TK, x_SLK[0, 1:])
    assert torch.equal(activations.absmax_K, torch.tensor([4.0, 4.0, 1.0]))


def test_sampled_tokens_are_spread_over_the_sequence() -> None:
    activations = _Activations(1, sampled_per_sequence=3)
    activations.update(torch.arange(18.0).reshape(2, 9, 1))
    assert activations.sample_TK.flatten().tolist() == [1.0, 4.0, 8.0, 10.0, 13.0, 17.0]


def test_dead_channels_give_finite_scales() -> None:
    scale_K = smoothing_scale(torch.tensor([0.0, 1.0, 100.0]), torch.tensor([1.0, 0.0, 1.0]), 0.5)
    assert torch.isfinite(scale_K).all()
    assert (scale_K > 0).all()
    assert torch.isfinite(smoothing_scale(torch.zeros(3), torch.zeros(3), 0.5)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_is_the_one_that_the_rounded_quotient_amounts_to(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    old_P = torch.randn(64, generator=generator).to(dtype).float()
    old_P[7] = 0.0
    wanted_P = 0.1 + 9 * torch.rand(64, generator=generator)
    scale_P = exact_scale(wanted_P, [old_P], [dtype])
    new_P = (old_P / scale_P).to(dtype).float()
    # float32 products and quotients, no rounding to the stored dtype
    assert torch.allclose(new_P * scale_P, old_P, rtol=1e-6, atol=0)
    assert torch.allclose(scale_P, wanted_P, rtol=2 * torch.finfo(dtype).eps)


def test_weight_and_bias_are_divided_exactly_by_powers_of_two() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_P, bias_P = (torch.randn(64, generator=generator).bfloat16().float() for _ in range(2))
    scale_P = exact_scale(0.1 + 9 * torch.rand(64, generator=generator), [weight_P, bias_P], [torch.bfloat16] * 2)
    for old_P in (weight_P, bias_P):
        assert torch.equal((old_P / scale_P).bfloat16().float() * scale_P, old_P)


def test_quotient_beyond_the_stored_dtype_keeps_its_scale_of_one() -> None:
    scale_P = exact_scale(torch.tensor([1e-3, 2.0]), [torch.tensor([6e4, 6e4])], [torch.float16])
    assert scale_P[0] == 1.0
    assert scale_P[1] == pytest.approx(2.0)
