import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.quantize import SOLVERS
from quantpipe.quantize.fake_quant import simulated_logits
from quantpipe.quantize.loop.sequential import Method, QuantizedModel, quantize_blocks
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.gptq import solve_gptq
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import Solution, SolverInput, SolverOptions
from quantpipe.quantize.targets.discover import find_targets
from quantpipe.quantize.transforms.transform import TransformInput, TransformRecord
from quantpipe.report import no_progress

NEAREST = Method([], solve_rtn, SolverOptions(scales="absmax"))
GPTQ = Method([], solve_gptq, reads_data=True)

TokenIds = npt.NDArray[np.int64]


def quantize(
    folder: Path,
    work_folder: Path,
    scheme: WeightScheme,
    method: Method,
    token_ids: TokenIds | None = None,
    overrides: tuple[tuple[tuple[str, ...], WeightScheme], ...] = (),
    position_ids: TokenIds | None = None,
) -> QuantizedModel:
    model = StreamedModel.open(folder)
    ignored = [] if overrides else ["lm_head"]
    targets = find_targets(model.module, model.blocks, ignored, scheme, overrides)
    return quantize_blocks(model, targets, method, token_ids, work_folder, "fingerprint", no_progress, position_ids)


def contents(quantized: QuantizedModel) -> dict[str, torch.Tensor]:
    """Every tensor of a result, to compare it with another."""
    weights = {
        f"{name}.{part}": tensor
        for name, weight in quantized.weights.items()
        for part, tensor in (("q", weight.q_NK), ("scale", weight.scale_NG))
    }
    return weights | dict(quantized.tensors) | dict(quantized.added)


def assert_same(first: QuantizedModel, second: QuantizedModel) -> None:
    one, other = contents(first), contents(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
    for a, b in zip(first.layers, second.layers, strict=True):
        assert replace(a, seconds=0) == replace(b, seconds=0)
    assert first.transformed == second.transformed


@pytest.fixture(scope="module")
def token_ids() -> TokenIds:
    return np.random.default_rng(0).integers(3, 128, (6, 32))


@pytest.fixture(scope="module")
def folder(random_llama: Callable[..., Path]) -> Path:
    return random_llama(torch.bfloat16)


def test_rounding_needs_no_data_and_covers_every_linear(folder: Path, tmp_path: Path) -> None:
    quantized = quantize(folder, tmp_path, w8a8(), NEAREST)
    assert len(quantized.weights) == 14
    assert {layer.name for layer in quantized.layers} == set(quantized.weights)
    assert all(layer.error_before == layer.error_after > 0 for layer in quantized.layers)


@pytest.mark.parametrize("solver", SOLVERS)
def test_base_model_is_left_as_it_was(folder: Path, tmp_path: Path, solver: str, token_ids: TokenIds) -> None:
    model = StreamedModel.open(folder)
    before = {name: model.module.get_parameter(name).clone() for name in model.outside()}
    targets = find_targets(model.module, model.blocks, ["lm_head"], w4a16(32))
    method = Method([], SOLVERS[solver], reads_data=True)
    quantize_blocks(model, targets, method, token_ids, tmp_path, "fingerprint", no_progress)
    assert all(torch.equal(model.module.get_parameter(name), tensor) for name, tensor in before.items())
    assert all(parameter.is_meta for block in model.blocks.blocks for parameter in block.parameters())


@pytest.mark.parametrize("sequential", [True, False])
def test_statistics_are_those_of_the_running_model(
    folder: Path, tmp_path: Path, token_ids: TokenIds, sequential: bool
) -> None:
    """The Hessian of the second block's down_proj equals one taken from a plain forward pass with hooks."""
    seen: list[torch.Tensor] = []

    def keep(given: SolverInput) -> Solution:
        assert given.statistics is not None
        assert given.statistics.num_tokens == token_ids.size
        seen.append(given.statistics.hessian_KK.clone())
        # 8 bits for each weight, so that later layers see nearly the original model
        return solve_rtn(SolverInput(given.weight_NK, given.scheme, torch.float32, None, NEAREST.options))

    method = Method([], keep, reads_data=True, sequential=sequential, propagate="full")
    quantize(folder, tmp_path, weight_only(8, 32), method, token_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
    tolerance = 2e-2 if sequential else 1e-4  # rounded linears before it in its block
    expected_KK = x_TK.T @ x_TK / len(x_TK)
    assert float((seen[7] - expected_KK).norm() / expected_KK.norm()) < tolerance


# Documents of 9, 12 and 11 tokens in each sequence.
APART = np.tile(np.concatenate([np.arange(9), np.arange(12), np.arange(11)]), (6, 1))


def test_statistics_of_documents_packed_apart_are_those_of_each_alone(
    folder: Path, tmp_path: Path, token_ids: TokenIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)
    seen: list[torch.Tensor] = []

    def keep(given: SolverInput) -> Solution:
        assert given.statistics is not None
        assert given.statistics.num_tokens == token_ids.size
        seen.append(given.statistics.hessian_KK.clone())
        return solve_rtn(SolverInput(given.weight_NK, given.scheme, torch.float32, None, NEAREST.options))

    method = Method([], keep, reads_data=True, sequential=False, propagate="full")
    quantize(folder, tmp_path, weight_only(8, 32), method, token_ids, position_ids=APART)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs: list[torch.Tensor] = []
    hook = model.get_submodule("model.layers.1.mlp.down_proj").register_forward_pre_hook(
        lambda _module, args: inputs.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    with torch.no_grad():
        for row in torch.from_numpy(token_ids):
            for document in row.split([9, 12, 11]):
                model(input_ids=document[None], use_cache=False)
    hook.remove()
    x_TK = torch.cat(inputs)
    expected_KK = x_TK.T @ x_TK / len(x_TK)
    assert float((seen[7] - expected_KK).norm() / expected_KK.norm()) < 1e-4


@pytest.mark.parametrize("propagate", ["quantized", "both"])
def test_an_interrupted_run_on_documents_packed_apart_ends_the_same(
    folder: Path, tmp_path: Path, token_ids: TokenIds, propagate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)
    method = Method([scale_norms], solve_gptq, reads_data=True, propagate=propagate)
    whole = quantize(folder, tmp_path / "whole", w4a16(32), method, token_ids, position_ids=APART)
    with pytest.raises(KilledError):
        cut = replace(killed_at(4 + 2), propagate=propagate)
        quantize(folder, tmp_path / "cut", w4a16(32), cut, token_ids, position_ids=APART)
    resumed = quantize(folder, tmp_path / "cut", w4a16(32), method, token_ids, position_ids=APART)
    assert_same(whole, resumed)
    crossing = quantize(folder, tmp_path / "crossing", w4a16(32), method, token_ids)
    assert any(not torch.equal(whole.weights[name].q_NK, weight.q_NK) for name, weight in crossing.weights.items())


def test_runs_on_documents_packed_apart_that_are_given_up_and_repeated_give_the_same_numbers(
    folder: Path, tmp_path: Path, token_ids: TokenIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)
    kept = quantize(folder, tmp_path / "kept", w4a16(32), GPTQ, token_ids, position_ids=APART)
    monkeypatch.setattr("quantpipe.quantize.loop.block_solving.MAX_SUSPENDED_BYTES", 1)
    assert_same(kept, quantize(folder, tmp_path / "given_up", w4a16(32), GPTQ, token_ids, position_ids=APART))


@pytest.mark.parametrize("propagate", ["quantized", "full", "both"])
@pytest.mark.parametrize("sequential", [True, False])
def test_runs_that_are_given_up_and_repeated_give_the_same_numbers(
    folder: Path,
    tmp_path: Path,
    token_ids: TokenIds,
    monkeypatch: pytest.MonkeyPatch,
    propagate: Any,
    sequential: bool,
) -> None:
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)
    method = Method([], solve_gptq, reads_data=True, sequential=sequential, propagate=propagate)
    kept = quantize(folder, tmp_path / "kept", w4a16(32), method, token_ids)
    monkeypatch.setattr("quantpipe.quantize.loop.block_solving.MAX_SUSPENDED_BYTES", 1)
    monkeypatch.setattr("quantpipe.quantize.loop.block_solving.MAX_STATISTICS_BYTES", 1)
    assert_same(kept, quantize(folder, tmp_path / "given_up", w4a16(32), method, token_ids))


def test_batch_size_does_not_change_the_result(
    folder: Path, tmp_path: Path, token_ids: TokenIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(folder, tmp_path / "whole", w4a16(32), GPTQ, token_ids)
    monkeypatch.setattr("quantpipe.quantize.model.block_runs.TOKENS_PER_BATCH", 64)
    parts = quantize(folder, tmp_path / "parts", w4a16(32), GPTQ, token_ids)
    for name, weight in whole.weights.items():
        # sums in another order may tip a value that lies between two integers
        assert (weight.q_NK == parts.weights[name].q_NK).float().mean() > 0.98, name


def test_two_runs_give_the_same_and_leave_the_callers_settings(
    folder: Path, tmp_path: Path, token_ids: TokenIds
) -> None:
    before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (quantize(folder, tmp_path / name, w8a8(), GPTQ, token_ids) for name in "ab")
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == before
    assert_same(first, second)


def test_one_block_at_a_time_is_in_memory(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: TokenIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the help of the garbage collector: freed blocks would otherwise pile up until it runs."""
    alive: list[weakref.ref[nn.Module]] = []
    most = []
    load, copy = StreamedModel.load_block, StreamedModel.work_copy

    def tracked(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def made(model: StreamedModel, given: Any) -> nn.Module:
            block = make(model, given)
            alive.append(weakref.ref(block))
            return block

        return made

    def solve(given: SolverInput) -> Solution:
        most.append(sum(ref() is not None for ref in alive))
        return solve_gptq(given)

    monkeypatch.setattr(StreamedModel, "load_block", tracked(load))
    monkeypatch.setattr(StreamedModel, "work_copy", tracked(copy))
    folder = random_llama(torch.bfloat16, num_hidden_layers=4)
    gc.disable()
    try:
        quantize(folder, tmp_path, w4a16(32), Method([], solve, reads_data=True), token_ids)
    finally:
        gc.enable()
    assert len(most) == 4 * 4
    assert max(most) == 2  # as it is stored, and at work


class KilledError(Exception):
    """Stands for a kill in the middle of a run."""


def killed_at(call: int) -> Method:
    """GPTQ that does not come back from its ``call``-th call."""
    calls = []

    def solve(given: SolverInput) -> Solution:
        calls.append(given)
        if len(calls) == call:
            raise KilledError
        return solve_gptq(given)

    return Method([scale_norms], solve, reads_data=True)


def scale_norms(given: TransformInput) -> list[TransformRecord]:
    """A transform that changes a stored tensor, and leaves a record."""
    norm = given.block.get_parameter("input_layernorm.weight")
    norm.mul_(2)
    for name in ("q_proj", "k_proj", "v_proj"):
        given.linears[f"self_attn.{name}"].weight.div_(2)
    return [TransformRecord(("self_attn.q_proj",), "input_layernorm", 0.5)]


@pytest.mark.parametrize("propagate", ["quantized", "both"])
def test_an_interrupted_run_goes_on_and_ends_the_same(
    folder: Path, tmp_path: Path, token_ids: TokenIds, propagate: Any
) -> None:
    """Interrupted twice: in the first block, of which nothing is kept, and in the second."""
    num_threads = threading.active_count()
    method = Method([scale_norms], solve_gptq, reads_data=True, propagate=propagate)
    whole = quantize(folder, tmp_path / "whole", w4a16(32), method, token_ids)
    for call, finished in ((3, []), (4 + 2, ["block-00000.json"])):
        with pytest.raises(KilledError):
            cut = replace(killed_at(call), propagate=propagate)
            quantize(folder, tmp_path / "cut", w4a16(32), cut, token_ids)
        assert [path.name for path in (tmp_path / "cut" / "fingerprint").glob("block-*.json")] == finished
    resumed = quantize(folder, tmp_path / "cut", w4a16(32), method, token_ids)
    assert_same(whole, resumed)
    assert len(resumed.transformed) == 2
    assert threading.active_count() == num_threads


def test_a_run_killed_by_the_system_goes_on_and_ends_the_same(
    folder: Path, tmp_path: Path, token_ids: TokenIds
) -> None:
    """SIGKILL in the second block, in a process of its own: nothing is tidied up."""
    np.save(tmp_path / "token_ids.npy", token_ids)
    script = f"""
import importlib.util, os, signal, sys
import numpy as np
from pathlib import Path
spec = importlib.util.spec_from_file_location("tests_of_loop", {str(Path(__file__))!r})
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
calls = []
def solve(given):
    calls.append(given)
    if len(calls) == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return tests.solve_gptq(given)
method = tests.Method([], solve, reads_data=True)
token_ids = np.load({str(tmp_path / "token_ids.npy")!r})
tests.quantize(Path({str(folder)!r}), Path({str(tmp_path / "cut")!r}), tests.w4a16(32), method, token_ids)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert len(list((tmp_path / "cut" / "fingerprint").glob("block-*.json"))) == 1
    resumed = quantize(folder, tmp_path / "cut", w4a16(32), GPTQ, token_ids)
    assert_same(quantize(folder, tmp_path / "whole", w4a16(32), GPTQ, token_ids), resumed)


def test_gptq_beats_rounding_on_a_trained_model(tiny_llama: Path, tmp_path: Path) -> None:
    import json as source

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = np.array(tokenizer(Path(source.decoder.__file__).read_text()).input_ids, dtype=np.int64)
    calibration, held_out = ids[: 16 * 128].reshape(16, 128), ids[-2 * 128 :].reshape(2, 128)
    model = StreamedModel.open(tiny_llama)
    expected = simulated_logits(model, None, held_out).log_softmax(-1)

    def divergence(quantized: QuantizedModel) -> float:
        found = simulated_logits(model, quantized, held_out).log_softmax(-1)
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    nearest = divergence(quantize(tiny_llama, tmp_path / "nearest", w4a16(64), NEAREST))
    solved = quantize(tiny_llama, tmp_path / "gptq", w4a16(64), GPTQ, calibration)
    assert divergence(solved) < 0.8 * nearest
    assert all(layer.error_after < layer.error_before for layer in solved.layers)


def test_scales_come_in_the_dtype_of_the_model(folder: Path, tmp_path: Path) -> None:
    weights = quantize(folder, tmp_path, w4a16(32), NEAREST).weights
    assert {weight.scale_NG.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.isfinite(weight.dequantized()).all() for weight in weights.values())


def test_expert_that_no_token_reaches_is_rounded_to_nearest(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """One token in all: it goes to two of four experts."""
    quantized = quantize(tiny_model("mixtral"), tmp_path, w4a16(32), GPTQ, np.array([[5]]))
    experts = [layer for layer in quantized.layers if ".0.mlp.experts." in layer.name and "down" in layer.name]
    assert sorted(layer.num_tokens for layer in experts) == [0, 0, 1, 1]
    assert all(layer.error_after == layer.error_before for layer in experts if layer.num_tokens == 0)


@pytest.mark.parametrize("name", ["gemma3", "opt", "phi3", "qwen3_moe"])
def test_other_families_are_quantized_better_than_by_rounding(
    tiny_model: Callable[..., Path], tmp_path: Path, token_ids: TokenIds, name: str
) -> None:
    folder = tiny_model(name)
    model = StreamedModel.open(folder)
    expected = simulated_logits(model, None, token_ids).log_softmax(-1)
    divergences = []
    for method in (NEAREST, GPTQ):
        quantized = quantize(folder, tmp_path, w4a16(32), method, token_ids if method.reads_data else None)
        found = simulated_logits(model, quantized, token_ids).log_softmax(-1)
        divergences.append(float((expected.exp() * (expected - found)).sum(-1).mean()))
        (tmp_path / "fingerprint").rename(tmp_path / f"done-{method.reads_data}")
    assert divergences[1] < divergences[0]


def test_head_at_8_bits_is_untied(folder: Path, tmp_path: Path, token_ids: TokenIds) -> None:
    head = weight_only(8, 32)
    quantized = quantize(folder, tmp_path, w4a16(32), GPTQ, token_ids, overrides=((("lm_head",), head),))
    assert quantized.weights["lm_head"].scheme == head
    assert quantized.config_updates == {"tie_word_embeddings": False}
    assert not quantized.added
    record = quantized.layers[-1]
    assert (record.name, record.scheme) == ("lm_head", head.label)
    assert 0 < record.error_after <= record.error_before < 1e-3
