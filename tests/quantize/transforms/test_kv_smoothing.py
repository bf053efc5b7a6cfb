"""K-smoothing computes what the model computed, exactly where values are stored, and tames keys with huge biases."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import MakeModel, random_model
from torch import nn

from quantpipe.formats.scheme import w4a16
from quantpipe.quantize.kv_int8 import KVLayerRecord, KVObserver
from quantpipe.quantize.model.block_runs import QUANTIZED, HiddenStates, StoredBatches, capture_block_inputs, run_block
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.watched_attention import watched_attention
from quantpipe.quantize.transforms.kv_smoothing import apply_k_smooth
from quantpipe.quantize.transforms.transform import TransformInput

FAMILIES = ("llama", "qwen2", "qwen3", "phi3", "gpt_neox")


def save_with_loud_keys(folder: Path, family: str) -> Path:
    """A bfloat16 model in which one rope pair of each key head is far louder than the others: by its bias, where keys
    have one, as Qwen2.5's do."""
    model = random_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("k_proj.bias", "k_proj.weight", "k_norm.weight")):
                loud = parameter if parameter.ndim == 2 or len(parameter) == 16 else None
                if name.endswith("bias"):
                    parameter[3::16] += 60.0
                elif loud is not None and not (name.endswith("weight") and family == "qwen2"):
                    loud[3::16] *= 20.0
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    return folder


def open_block(folder: Path, work: Path, ignored: tuple[str, ...] = ()) -> TransformInput:
    model = StreamedModel.open(folder, attention=watched_attention())
    hidden = HiddenStates(work)
    token_ids_SL = np.random.default_rng(0).integers(3, 120, (4, 40))
    kwargs = capture_block_inputs(model, token_ids_SL, hidden, [QUANTIZED])
    original = model.load_block(0)
    block = model.work_copy(original)
    linears = {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(ignored or "nothing")
    }
    schemes = dict.fromkeys(linears, w4a16(32))
    return TransformInput(block, original, linears, StoredBatches(hidden, kwargs, 0), schemes)


@torch.no_grad()
def observed(given: TransformInput) -> KVLayerRecord:
    observer = KVObserver("auto")
    with observer.observing(0):
        for batch in given.batches:
            run_block(given.block, batch)
    return observer.record_of(0)


@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_loud_keys_lose_far_less_in_an_int8_cache(tmp_path: Path, family: str) -> None:
    given = open_block(save_with_loud_keys(tmp_path / "model", family), tmp_path)
    before = observed(given)
    [record] = apply_k_smooth(given)
    after = observed(given)
    assert record.producer is not None and record.alpha is not None and record.detail is not None
    assert record.error_before is not None and record.error_after is not None
    assert record.error_after < record.error_before / 4
    assert after.errors["int8_per_token_head"] < before.errors["int8_per_token_head"] / 4
    assert after.errors["int8_static"] < before.errors["int8_static"]


@pytest.mark.parametrize("ignored", [(), ("q_proj", "k_proj", "qkv_proj", "query_key_value")])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_block_computes_the_same_with_what_is_stored(tmp_path: Path, family: str, ignored: tuple[str, ...]) -> None:
    given = open_block(save_with_loud_keys(tmp_path / "model", family), tmp_path, ignored)
    before = copy.deepcopy(given.block)
    [record] = apply_k_smooth(given)
    batch = given.batches[0]
    probe = batch.first_sequence(torch.float64)
    expected = run_block(before.double(), probe) - probe.hidden_SLD
    found = run_block(copy.deepcopy(given.block).double(), probe) - probe.hidden_SLD
    assert (found - expected).norm() < 1e-5 * expected.norm()
    for name, parameter in given.block.named_parameters():
        if name.removesuffix(".weight") not in given.linears:
            stored = parameter.to(given.original.get_parameter(name).dtype).float()
            assert torch.equal(stored, parameter), f"{name} cannot be stored exactly"
    changed = {n for n, p in given.block.named_parameters() if not torch.equal(p, before.get_parameter(n).float())}
    assert bool(changed) == (record.producer is not None)


def test_block_without_a_fold_is_left_as_it_was_with_the_reason(tiny_model: MakeModel, tmp_path: Path) -> None:
    given = open_block(tiny_model("gemma3"), tmp_path)
    before = copy.deepcopy(given.block.state_dict())
    [record] = apply_k_smooth(given)
    assert record.producer is None and record.reason is not None and "changes the block's output" in record.reason
    assert record.linears == ("self_attn.q_norm", "self_attn.k_norm")
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.block.state_dict().items())


def test_bias_that_would_leave_its_dtype_keeps_its_pair_at_one(tmp_path: Path) -> None:
    model = random_model("qwen2")
    with torch.no_grad():
        bias = model.get_parameter("model.layers.0.self_attn.k_proj.bias")
        bias[3::16] += 60.0
        bias[11] = 2.0**-24 * 3  # float16 holds no half of it
    model.to(torch.float16).save_pretrained(tmp_path / "model")  # type: ignore[operator]
    given = open_block(tmp_path / "model", tmp_path)
    before = given.block.get_parameter("self_attn.k_proj.bias").clone()
    apply_k_smooth(given)
    after = given.block.get_parameter("self_attn.k_proj.bias")
    assert torch.equal(after[[3, 11]], before[[3, 11]])
    assert after[19] == before[19] * (after[19] / before[19]) and after[19] < before[19]
