from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import quantization_config, write_artifact
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8
from quantpipe.quantize.discover import find_blocks, find_targets
from quantpipe.quantize.fake_quant import fake_quantize, fake_quantized_logits
from quantpipe.quantize.loading import load_base_model
from quantpipe.quantize.rtn import solve_rtn
from quantpipe.quantize.sequential import quantize_blocks
from quantpipe.quantize.smoothquant import apply_smoothquant
from quantpipe.report import no_progress


@pytest.mark.parametrize("scheme", [w4a16(32), w8a8()], ids=lambda s: s.name)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_simulated_logits_equal_those_of_the_artifact_loaded_by_transformers(
    random_llama: Callable[..., Path], tmp_path: Path, scheme: WeightScheme, tied: bool
) -> None:
    folder = random_llama(torch.bfloat16, tie_word_embeddings=tied)
    model = load_base_model(folder)
    blocks = find_blocks(model)
    targets = find_targets(model, blocks, ["lm_head"], scheme)
    quantized = quantize_blocks(model, blocks, targets, scheme, solve_rtn, None, None, no_progress)
    weights = quantized.weights
    write_artifact(
        tmp_path / "artifact",
        Artifact.open(folder),
        weights,
        quantization_config(dict.fromkeys(weights, scheme), list(targets.ignored)),
        {},
    )
    token_ids = np.random.default_rng(0).integers(3, 128, (2, 16))
    fake_quantize(model, quantized)
    simulated = fake_quantized_logits(model, weights, token_ids, divisor=127.5)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "artifact", dtype=torch.float32)
    with torch.no_grad():
        logits = reloaded(input_ids=torch.from_numpy(token_ids)).logits
    # the same float32 operations on the same numbers
    assert torch.allclose(simulated, logits, atol=1e-5)


def test_hooks_are_gone_afterwards(random_llama: Callable[..., Path]) -> None:
    model = load_base_model(random_llama())
    blocks = find_blocks(model)
    targets = find_targets(model, blocks, ["lm_head"], w8a8())
    weights = quantize_blocks(model, blocks, targets, w8a8(), solve_rtn, None, None, no_progress).weights
    token_ids = np.array([[3, 4, 5]])
    first = fake_quantized_logits(model, weights, token_ids, 127.0)
    assert torch.equal(fake_quantized_logits(model, weights, token_ids, 127.0), first)
    assert not torch.equal(fake_quantized_logits(model, {}, token_ids, 127.0), first)


def test_simulated_logits_with_a_transform_equal_those_of_the_artifact(
    random_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """The transform's norms are stored beside the weights, in the model's own dtype."""
    folder = random_llama(torch.bfloat16)
    model = load_base_model(folder)
    blocks, scheme = find_blocks(model), w8a8()
    targets = find_targets(model, blocks, ["lm_head"], scheme)
    token_ids = np.random.default_rng(0).integers(3, 128, (4, 16))
    quantized = quantize_blocks(
        model, blocks, targets, scheme, solve_rtn, None, token_ids, no_progress, [apply_smoothquant]
    )
    assert quantized.tensors
    declared = quantization_config(dict.fromkeys(weights, scheme), list(targets.ignored))
    base = Artifact.open(folder)
    artifact = write_artifact(tmp_path / "artifact", base, quantized.weights, declared, {}, tensors=quantized.tensors)
    for name, tensor in quantized.tensors.items():
        assert torch.equal(artifact.tensor(name), tensor)
        assert not torch.equal(tensor, base.tensor(name))
    fake_quantize(model, quantized)
    simulated = fake_quantized_logits(model, quantized.weights, token_ids, divisor=127.5)
    reloaded = AutoModelForCausalLM.from_pretrained(artifact.folder, dtype=torch.float32)
    with torch.no_grad():
        logits = reloaded(input_ids=torch.from_numpy(token_ids)).logits
    # the same float32 operations on the same numbers
    assert torch.allclose(simulated, logits, atol=1e-5)
