from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.quantize.fake_quant import SERVED, TRANSFORMERS, simulated_logits
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.loop.sequential import Method, quantize_blocks
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.solvers.gptq import solve_gptq
from quantpipe.quantize.solvers.rtn import solve_rtn
from quantpipe.quantize.solvers.solver import SolverOptions
from quantpipe.quantize.targets.discover import Override, find_targets
from quantpipe.quantize.transforms.transform import TransformInput, TransformRecord
from quantpipe.quantize.writing import write_quantized
from quantpipe.report import no_progress

NEAREST = Method([], solve_rtn, SolverOptions(scales="absmax"))
TokenIds = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def token_ids() -> TokenIds:
    return np.random.default_rng(0).integers(3, 128, (2, 16))


def reloaded_logits(
    folder: Path,
    tmp_path: Path,
    token_ids: TokenIds,
    method: Method,
    scheme: WeightScheme,
    overrides: tuple[Override, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits simulated, and those of the artifact that transformers loads."""
    model = StreamedModel.open(folder)
    targets = find_targets(model.module, model.blocks, [] if overrides else ["lm_head"], scheme, overrides)
    ids = token_ids if method.reads_data else None
    quantized = quantize_blocks(model, targets, method, ids, tmp_path / "work", "fingerprint", no_progress)
    simulated = simulated_logits(StreamedModel.open(folder), quantized, token_ids, TRANSFORMERS)
    artifact = write_quantized(tmp_path / "artifact", model, quantized, targets, {})
    reloaded = AutoModelForCausalLM.from_pretrained(artifact.folder, dtype=torch.float32)
    with torch.no_grad():
        return simulated, reloaded(input_ids=torch.from_numpy(token_ids)).logits


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8()], ids=lambda s: s.name)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_simulated_logits_equal_those_of_the_artifact_loaded_by_transformers(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: TokenIds, scheme: WeightScheme, tied: bool
) -> None:
    folder = random_llama(torch.bfloat16, tie_word_embeddings=tied)
    simulated, reloaded = reloaded_logits(folder, tmp_path, token_ids, NEAREST, scheme)
    # the same float32 operations on the same numbers
    assert torch.allclose(simulated, reloaded, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_quantized_head_is_simulated_too(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: TokenIds, tied: bool
) -> None:
    folder = random_llama(torch.bfloat16, tie_word_embeddings=tied)
    head: Override = (("lm_head",), weight_only(8, 32))
    simulated, reloaded = reloaded_logits(folder, tmp_path, token_ids, NEAREST, w4a16(32), (head,))
    assert torch.allclose(simulated, reloaded, atol=1e-5)


def double_norms(given: TransformInput) -> list[TransformRecord]:
    """A transform whose effect stays in the block, and whose norms no linear of the base fits."""
    given.block.get_parameter("input_layernorm.weight").mul_(2)
    for name in ("q_proj", "k_proj", "v_proj"):
        given.linears[f"self_attn.{name}"].weight.div_(2)
    return []


def test_changed_tensors_are_simulated_and_stored(
    random_llama: Callable[..., Path], tmp_path: Path, token_ids: TokenIds
) -> None:
    method = Method([double_norms], solve_gptq, reads_data=True)
    simulated, reloaded = reloaded_logits(random_llama(torch.bfloat16), tmp_path, token_ids, method, w8a8())
    assert torch.allclose(simulated, reloaded, atol=1e-5)


def test_model_is_left_as_it_was(random_llama: Callable[..., Path], tmp_path: Path, token_ids: TokenIds) -> None:
    model = StreamedModel.open(random_llama())
    before = simulated_logits(model, None, token_ids)
    targets = find_targets(model.module, model.blocks, ["lm_head"], w8a8())
    quantized = quantize_blocks(model, targets, NEAREST, None, tmp_path, "fingerprint", no_progress)
    first = simulated_logits(model, quantized, token_ids, SERVED)
    assert not torch.equal(first, before)
    assert torch.equal(simulated_logits(model, quantized, token_ids, SERVED), first)
    assert torch.equal(simulated_logits(model, None, token_ids), before)


def test_untied_head_leaves_the_embedding_alone(random_llama: Callable[..., Path], token_ids: TokenIds) -> None:
    model = StreamedModel.open(random_llama(tie_word_embeddings=True))
    before = simulated_logits(model, None, token_ids)
    doubled = QuantizedModel({}, (), added={"lm_head.weight": model.module.get_parameter("lm_head.weight") * 2})
    assert torch.allclose(simulated_logits(model, doubled, token_ids), before * 2, atol=1e-5)


def test_head_that_stays_tied_changes_with_the_embedding(
    random_llama: Callable[..., Path], token_ids: TokenIds
) -> None:
    folder, name = random_llama(tie_word_embeddings=True), "model.embed_tokens.weight"
    changed = StreamedModel.open(folder)
    changed.module.get_parameter(name).mul_(2)
    quantized = QuantizedModel({}, (), tensors={name: changed.module.get_parameter(name)})
    found = simulated_logits(StreamedModel.open(folder), quantized, token_ids)
    assert torch.equal(found, simulated_logits(changed, None, token_ids))


def test_nudge_disturbs_by_little(random_llama: Callable[..., Path], token_ids: TokenIds) -> None:
    model = StreamedModel.open(random_llama())
    before, nudged = (simulated_logits(model, None, token_ids, nudge=amount) for amount in (0.0, 1e-6))
    assert not torch.equal(before, nudged)
    assert torch.allclose(before, nudged, atol=1e-3)
