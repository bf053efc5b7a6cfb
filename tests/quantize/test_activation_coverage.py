import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quantpipe.quantize.activation_coverage import ActivationCoverage, InputCoverage, measure_activations
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.report import no_progress

TOKEN_IDS = np.random.default_rng(0).integers(3, 60, (8, 16))
LIKE_IT = np.random.default_rng(1).integers(3, 60, (6, 16))
UNLIKE_IT = np.random.default_rng(1).integers(60, 128, (6, 16))


def measured(folder: Path, work: Path, token_ids: np.ndarray = TOKEN_IDS, **held_out: np.ndarray) -> ActivationCoverage:
    return measure_activations(StreamedModel.open(folder), token_ids, None, held_out, work / "own", no_progress)


def input_of(coverage: ActivationCoverage, block: int, linear: str) -> InputCoverage:
    return next(each for each in coverage.inputs if each.block == block and linear in each.linears)


def read_by(folder: Path, name: str, token_ids: np.ndarray) -> torch.Tensor:
    """What a linear reads in the running model [T, K]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.from_numpy(token_ids), use_cache=False)
    hook.remove()
    return seen[0].flatten(0, -2)


def test_inputs_are_those_of_every_block_in_order(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    coverage = measured(tiny_model("llama"), tmp_path, near=LIKE_IT)
    assert [(each.block, each.role) for each in coverage.inputs] == [
        (block, role)
        for block in (0, 1)
        for role in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    assert coverage.inputs[0].linears == ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert {each.num_tokens for each in coverage.inputs} == {TOKEN_IDS.size}
    assert (coverage.num_sequences, coverage.sequence_length, coverage.num_blocks) == (8, 16, 2)


def test_values_beyond_the_range_are_those_that_plain_hooks_find(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model("llama")
    coverage = measured(folder, tmp_path, near=LIKE_IT, far=UNLIKE_IT)
    for linear in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"model.layers.1.{linear}"
        absmax_K = read_by(folder, name, TOKEN_IDS).abs().amax(0)
        found = input_of(coverage, 1, linear).held_out
        for each, token_ids in zip(found, (LIKE_IT, UNLIKE_IT), strict=True):
            x_TK = read_by(folder, name, token_ids).abs()
            # values at the very edge may fall on either side: sums are made in another order
            assert abs(each.num_beyond - int((x_TK > absmax_K).sum())) <= 2
            assert each.num_values == x_TK.numel()
            assert each.largest_ratio == pytest.approx(float((x_TK / absmax_K).max()), rel=1e-4)


def test_text_that_was_calibrated_on_is_within_the_range(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    coverage = measured(tiny_model("llama"), tmp_path, same=TOKEN_IDS)
    assert all(each.held_out[0].num_beyond == 0 for each in coverage.inputs)
    assert all(each.held_out[0].largest_ratio == 1 for each in coverage.inputs)


def test_other_text_is_beyond_the_range_more_often(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    first = measured(tiny_model("llama"), tmp_path, near=LIKE_IT, far=UNLIKE_IT).inputs[0]
    near, far = (each.num_beyond / each.num_values for each in first.held_out)
    assert far > 2 * near > 0


def test_the_curve_is_that_of_the_first_sequences_alone(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("llama")
    curve = input_of(measured(folder, tmp_path), 1, "mlp.down_proj").curve
    assert [point.num_sequences for point in curve] == [1, 2, 4, 8]
    x_SLK = read_by(folder, "model.layers.1.mlp.down_proj", TOKEN_IDS).view(8, 16, -1)
    absmax, square_K = float(x_SLK.abs().amax((0, 1)).mean()), x_SLK.square().mean((0, 1))
    for point in curve:
        part_SLK = x_SLK[: point.num_sequences]
        expected = (absmax - float(part_SLK.abs().amax((0, 1)).mean())) / absmax
        assert point.absmax_change == pytest.approx(expected, abs=1e-4)
        error_K = part_SLK.square().mean((0, 1)) - square_K
        assert point.hessian_change == pytest.approx(float(error_K.norm() / square_K.norm()), abs=1e-4)
    assert (curve[-1].absmax_change, curve[-1].hessian_change) == (0, 0)


def test_the_same_text_over_and_over_is_settled_at_once(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    coverage = measured(tiny_model("llama"), tmp_path, np.tile(TOKEN_IDS[:1], (8, 1)))
    assert all(
        point.hessian_change < 1e-5 and point.absmax_change < 1e-5 for each in coverage.inputs for point in each.curve
    )


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 9])
def test_few_sequences_give_the_points_that_there_are(
    tiny_model: Callable[..., Path], tmp_path: Path, num_sequences: int
) -> None:
    token_ids = np.random.default_rng(0).integers(3, 60, (num_sequences, 16))
    counts = [point.num_sequences for point in measured(tiny_model("llama"), tmp_path, token_ids).inputs[0].curve]
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == num_sequences


def test_batches_do_not_change_what_is_found(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(tiny_model("llama"), tmp_path, far=UNLIKE_IT)
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 48)  # parts end within batches
    parts = measured(tiny_model("llama"), tmp_path, far=UNLIKE_IT)
    for one, other in zip(whole.inputs, parts.inputs, strict=True):
        assert [point.hessian_change for point in one.curve] == pytest.approx(
            [point.hessian_change for point in other.curve], abs=1e-5
        )
        # sums are made in another order: a value at the edge may fall on the other side
        assert abs(one.held_out[0].num_beyond - other.held_out[0].num_beyond) <= 2


def test_documents_packed_apart_have_the_ranges_that_each_has_alone(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model, positions = StreamedModel.open(tiny_model("llama")), np.tile(np.arange(16), (4, 2))
    packed = measure_activations(
        model, TOKEN_IDS.reshape(4, 32), positions, {"far": UNLIKE_IT}, tmp_path / "own", no_progress
    )
    alone = measured(tiny_model("llama"), tmp_path, far=UNLIKE_IT)
    for one, other in zip(packed.inputs, alone.inputs, strict=True):
        assert abs(one.held_out[0].num_beyond - other.held_out[0].num_beyond) <= 2
        assert one.held_out[0].largest_ratio == pytest.approx(other.held_out[0].largest_ratio, rel=1e-4)


def test_experts_are_counted_on_the_tokens_that_come_to_them(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    coverage = measured(tiny_model("qwen3_moe"), tmp_path, far=UNLIKE_IT)
    downs = [each for each in coverage.inputs if each.block == 0 and each.role == "mlp.experts.*.down_proj"]
    assert sum(each.num_tokens for each in downs) == 2 * TOKEN_IDS.size  # two experts for each token
    width = 64
    assert sum(each.held_out[0].num_values for each in downs) == 2 * UNLIKE_IT.size * width
    assert all(np.isfinite([point.hessian_change for point in each.curve]).all() for each in downs)


def test_experts_that_no_calibration_token_reaches_are_named(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    coverage = measured(tiny_model("qwen3_moe"), tmp_path, np.array([[5]]), far=UNLIKE_IT)
    first = [name for name in coverage.unreached if name.startswith("model.layers.0.mlp.experts.")]
    assert len(first) == 2 * 3  # two of four experts, three linears each
    seen = {f"model.layers.0.{leaf}" for each in coverage.inputs if each.block == 0 for leaf in each.linears}
    assert not seen & set(first)


def test_a_channel_that_was_always_zero_is_beyond_its_range_with_anything(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, but relative to nothing: the largest ratio stays finite."""
    load = StreamedModel.load_block

    def deaf(model: StreamedModel, index: int) -> Any:
        block = load(model, index)
        norm = block.get_submodule("input_layernorm")
        # calibration sequences are 16 tokens long, held-out ones 8
        norm.register_forward_hook(
            lambda _module, _args, x: x.clone().index_fill_(2, torch.tensor([5]), x.shape[1] == 8)
        )
        return block

    monkeypatch.setattr(StreamedModel, "load_block", deaf)
    coverage = measured(tiny_model("llama"), tmp_path, far=TOKEN_IDS[:, :8])
    found = input_of(coverage, 0, "self_attn.q_proj").held_out[0]
    assert found.num_beyond == 8 * 8
    assert found.largest_ratio <= 1


def test_nothing_is_left_behind_and_what_a_killed_run_left_is_removed(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "own" / "held-out-0").mkdir(parents=True)
    (tmp_path / "own" / "held-out-0" / "stale").write_text("")
    first = measured(tiny_model("llama"), tmp_path, near=LIKE_IT)
    assert list(tmp_path.iterdir()) == []
    assert measured(tiny_model("llama"), tmp_path, near=LIKE_IT) == first


def test_json_holds_it_all(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    coverage = measured(tiny_model("llama"), tmp_path, near=LIKE_IT)
    stored = json.loads(json.dumps(coverage.to_json(), allow_nan=False))
    assert stored["domains"] == ["near"]
    assert stored["inputs"][0]["held_out"][0]["num_values"] == LIKE_IT.size * 64
    assert stored["inputs"][7]["curve"][-1] == {"num_sequences": 8, "absmax_change": 0.0, "hessian_change": 0.0}
