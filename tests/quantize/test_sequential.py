from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from quantpipe.formats.layout import decode
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8
from quantpipe.quantize import SOLVERS
from quantpipe.quantize.discover import find_blocks, find_targets
from quantpipe.quantize.fake_quant import fake_quantize, fake_quantized_logits
from quantpipe.quantize.loading import load_base_model
from quantpipe.quantize.sequential import QuantizedModel, SolverSettings, quantize_blocks
from quantpipe.quantize.solver import Solution, SolverInput
from quantpipe.report import no_progress

SEQUENTIAL = SolverSettings(damp_frac=0.01, sequential=True, propagate_quantized=True)


def quantize(
    model: nn.Module,
    scheme: WeightScheme,
    solver: str = "rtn",
    settings: SolverSettings | None = None,
    token_ids: npt.NDArray[np.int64] | None = None,
) -> QuantizedModel:
    blocks = find_blocks(model)
    targets = find_targets(model, blocks, ["lm_head"], scheme)
    return quantize_blocks(model, blocks, targets, scheme, SOLVERS[solver], settings, token_ids, no_progress)


@pytest.fixture(scope="module")
def token_ids() -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(3, 128, (6, 32))


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path]) -> Path:
    return random_llama(torch.bfloat16)


def test_rounding_needs_no_data_and_covers_every_linear(folder: Path) -> None:
    quantized = quantize(load_base_model(folder), w8a8())
    assert len(quantized.weights) == 14
    assert {layer.name for layer in quantized.layers} == set(quantized.weights)


@pytest.mark.parametrize("solver", SOLVERS)
def test_base_model_is_left_as_it_was(folder: Path, solver: str, token_ids: npt.NDArray[np.int64]) -> None:
    model = load_base_model(folder)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    if solver == "rtn":
        quantize(model, w4a16(32))
    else:
        quantize(model, w4a16(32), solver, SEQUENTIAL, token_ids)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_statistics_are_those_of_the_running_model(folder: Path, token_ids: npt.NDArray[np.int64]) -> None:
    """The Hessian of the first block's down_proj equals one taken from a plain forward pass with hooks."""
    model = load_base_model(folder).float()
    seen: dict[int, torch.Tensor] = {}

    def keep(given: SolverInput) -> Solution:
        assert given.hessian_KK is not None
        seen[len(seen)] = given.hessian_KK.clone()
        # integers that represent the weights almost exactly, so that later layers see the original model
        scale_NG = torch.full((given.weight_NK.shape[0], 1), 1e-9)
        return Solution(torch.zeros_like(given.weight_NK, dtype=torch.int8), scale_NG)

    blocks = find_blocks(model)
    scheme = w4a16(32)
    targets = find_targets(model, blocks, ["lm_head"], scheme)
    one_shot = SolverSettings(damp_frac=0.01, sequential=False, propagate_quantized=False)
    quantize_blocks(model, blocks, targets, scheme, keep, one_shot, token_ids, no_progress)

    inputs: list[torch.Tensor] = []
    hook = model.get_submodule("model.layers.1.mlp.down_proj").register_forward_pre_hook(
        lambda _module, args: inputs.append(args[0])
    )
    with torch.no_grad():
        model(input_ids=torch.from_numpy(token_ids), use_cache=False)
    hook.remove()
    x_TK = inputs[0].reshape(-1, inputs[0].shape[-1])
    # per block: q/k/v together, o, gate/up together, down
    assert len(seen) == 8
    assert torch.allclose(seen[7], x_TK.T @ x_TK / len(x_TK), rtol=1e-4, atol=1e-6)


def test_batch_size_does_not_change_the_result(
    folder: Path, token_ids: npt.NDArray[np.int64], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_base_model(folder)
    whole = quantize(model, w4a16(32), "gptq", SEQUENTIAL, token_ids)
    monkeypatch.setattr("quantpipe.quantize.block_runs.TOKENS_PER_BATCH", 64)
    parts = quantize(model, w4a16(32), "gptq", SEQUENTIAL, token_ids)
    for name, weight in whole.weights.items():
        # sums in another order may tip a value that lies between two integers
        assert (weight.q_NK == parts.weights[name].q_NK).float().mean() > 0.98, name


def test_two_runs_give_the_same_integers_and_leave_the_random_state(
    folder: Path, token_ids: npt.NDArray[np.int64]
) -> None:
    state = torch.get_rng_state()
    first, second = (quantize(load_base_model(folder), w8a8(), "gptq", SEQUENTIAL, token_ids) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in first.weights.items():
        assert torch.equal(weight.q_NK, second.weights[name].q_NK)
        assert torch.equal(weight.scale_NG, second.weights[name].scale_NG)


def divergence(tiny_llama: Path, quantized: QuantizedModel, token_ids: npt.NDArray[np.int64]) -> float:
    """Mean KL against the trained model in float32."""
    base = load_base_model(tiny_llama).float()
    expected = fake_quantized_logits(base, {}, token_ids, 127.0).log_softmax(-1)
    fake_quantize(base, quantized)
    found = fake_quantized_logits(base, quantized.weights, token_ids, 127.0).log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def test_gptq_beats_rounding_on_a_trained_model(tiny_llama: Path) -> None:
    import json as source

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = np.array(tokenizer(Path(source.decoder.__file__).read_text()).input_ids, dtype=np.int64)
    calibration, held_out = ids[: 16 * 128].reshape(16, 128), ids[-2 * 128 :].reshape(2, 128)
    model = load_base_model(tiny_llama)
    nearest = divergence(tiny_llama, quantize(model, w4a16(64)), held_out)
    solved = divergence(tiny_llama, quantize(model, w4a16(64), "gptq", SEQUENTIAL, calibration), held_out)
    assert solved < 0.8 * nearest


def test_scales_come_in_the_dtype_of_the_model(folder: Path) -> None:
    weights = quantize(load_base_model(folder), w4a16(32)).weights
    assert {weight.scale_NG.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.isfinite(decode(weight.q_NK, weight.scale_NG)).all() for weight in weights.values())
