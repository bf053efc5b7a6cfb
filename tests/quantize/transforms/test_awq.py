from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import MakeModel
from first_block import given_block
from trained_model import divergence, quantize, text_of

from quantpipe.formats.scheme import w4a16, w8a8, weight_only
from quantpipe.quantize.model.block_runs import run_block
from quantpipe.quantize.transforms.awq import GRID_SIZE, _lowest, _parent_of, apply_awq, importance_scale

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "mixtral"])
def test_block_computes_the_same_and_no_recorded_error_grows(
    tiny_model: MakeModel, tmp_path: Path, family: str
) -> None:
    given = given_block(tiny_model(family, torch.bfloat16), tmp_path)
    probe = given.batches[0].first_sequence(torch.float64)
    with torch.no_grad():
        expected = run_block(given.block.double(), probe)
        given.block.float()
        records = apply_awq(given)
        found = run_block(given.block.double(), probe)
    # weights and scales are float32, and so is the inside of some norms
    assert (found - expected).norm() < 1e-5 * (expected - probe.hidden_SLD).norm()
    scaled = [record for record in records if record.producer is not None]
    assert scaled
    for record in scaled:
        assert record.error_before is not None
        assert record.error_after is not None
        assert record.error_after < record.error_before
        assert record.alpha in [step / GRID_SIZE for step in range(1, GRID_SIZE)]


def test_weights_round_better_than_without(tiny_llama: Path, tmp_path: Path) -> None:
    calibration, held_out = text_of(tiny_llama, 8)
    scheme = weight_only(3, 64)
    plain = quantize(tiny_llama, tmp_path / "a", scheme, [], calibration, scales="hessian")
    scaled = quantize(tiny_llama, tmp_path / "b", scheme, [apply_awq], calibration, scales="hessian")
    assert divergence(tiny_llama, scaled, held_out) < 0.95 * divergence(tiny_llama, plain, held_out)


def test_loss_is_that_of_the_module_that_holds_all_readers() -> None:
    assert _parent_of(QKV) == "self_attn"
    assert _parent_of(("attn.q", "mlp.up")) == ""
    assert _parent_of(("mlp.experts.0.gate", "mlp.experts.1.gate")) == "mlp.experts"
    assert _parent_of(("mlp.experts.1.gate", "mlp.experts.1.up")) == "mlp.experts.1"


def test_the_grid_holds_no_scale_at_all_and_its_search_finds_the_lowest() -> None:
    for lowest in range(GRID_SIZE):
        tried: list[int] = []

        def error(step: int, lowest: int = lowest, tried: list[int] = tried) -> float:
            tried.append(step)
            return abs(step - lowest - 0.1)

        assert _lowest(error) == lowest
        assert 0 in tried
    assert torch.equal(importance_scale(torch.rand(8), 0.0), torch.ones(8))


def test_louder_channels_get_larger_scales() -> None:
    scale_P = importance_scale(torch.tensor([0.0, 1.0, 4.0, 16.0]), 0.5)
    assert torch.isfinite(scale_P).all()
    assert float(scale_P[3] / scale_P[1]) == pytest.approx(4.0)
    assert float(scale_P.max() * scale_P.min()) == pytest.approx(1.0)


def test_what_no_scale_improves_is_left_as_it_was(
    random_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # loud channels made small: far from anything that helps
    monkeypatch.setattr("quantpipe.quantize.transforms.awq.importance_scale", lambda mean_P, _ratio: mean_P**-8.0)
    given = given_block(random_llama(), tmp_path)
    records = apply_awq(given)
    assert [record.reason for record in records] == ["no scale lowers the output error"] * 4
    assert all(record.error_after == record.error_before for record in records)
    for name, parameter in given.block.named_parameters():
        assert torch.equal(parameter, given.original.get_parameter(name)), name


def test_linears_that_read_8_bit_activations_are_left_alone(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    given = given_block(random_llama(), tmp_path, w8a8())
    records = apply_awq(given)
    assert {record.reason for record in records} == {"what it reads is quantized too"}
    for name, parameter in given.block.named_parameters():
        assert torch.equal(parameter, given.original.get_parameter(name)), name


def test_two_runs_agree_and_leave_the_random_state(random_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = random_llama(torch.bfloat16)
    state = torch.get_rng_state()
    token_ids = np.random.default_rng(0).integers(3, 128, (4, 32))
    first, second = (quantize(folder, tmp_path / name, w4a16(32), [apply_awq], token_ids) for name in "ab")
    assert torch.equal(torch.get_rng_state(), state)
    assert first.transformed == second.transformed
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    assert all(torch.equal(weight.q_NK, second.weights[name].q_NK) for name, weight in first.weights.items())
