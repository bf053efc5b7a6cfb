"""Queries and keys are found in the run of a block whatever its family, and a fold is used only where it is proved."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import MakeModel
from torch import nn

from quantpipe.quantize.model.block_runs import (
    QUANTIZED,
    Batch,
    HiddenStates,
    StoredBatches,
    capture_block_inputs,
    run_block,
)
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.watched_attention import watched_attention
from quantpipe.quantize.transforms.key_folds import UNSEEN, KeyFold, NoKeyFold, find_key_fold

HALVES = [8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7]
PARTIAL = [2, 3, 0, 1, *range(4, 16)]
# Family -> what makes queries and keys, and which channel rope turns with each.
FOUND = {
    "llama": ("self_attn.q_proj", "self_attn.k_proj", HALVES),
    "mistral": ("self_attn.q_proj", "self_attn.k_proj", HALVES),
    "qwen2": ("self_attn.q_proj", "self_attn.k_proj", HALVES),
    "qwen3": ("self_attn.q_norm", "self_attn.k_norm", HALVES),
    "phi3": ("self_attn.qkv_proj", "self_attn.qkv_proj", HALVES),
    "gpt_neox": ("attention.query_key_value", "attention.query_key_value", PARTIAL),
    "mixtral": ("self_attn.q_proj", "self_attn.k_proj", HALVES),
    "qwen3_moe": ("self_attn.q_norm", "self_attn.k_norm", HALVES),
}


def open_block(folder: Path, work: Path, attention: str | None = None) -> tuple[nn.Module, Batch]:
    """The second block in float32, and what it is called with for two sequences of 80 tokens."""
    model = StreamedModel.open(folder, attention=attention or watched_attention())
    hidden = HiddenStates(work)
    token_ids_SL = np.random.default_rng(0).integers(3, 120, (2, 80))
    kwargs = capture_block_inputs(model, token_ids_SL, hidden, [QUANTIZED])
    return model.work_copy(model.load_block(1)), StoredBatches(hidden, kwargs, 1)[0]


@pytest.mark.parametrize("family", FOUND)
def test_fold_is_found_and_leaves_the_block_as_it_computes(tiny_model: MakeModel, tmp_path: Path, family: str) -> None:
    block, batch = open_block(tiny_model(family), tmp_path)
    before = copy.deepcopy(block.state_dict())
    fold = find_key_fold(block, batch)
    assert isinstance(fold, KeyFold)
    assert (fold.query, fold.key, fold.partner_D.tolist()) == FOUND[family]
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())

    exact, probe = copy.deepcopy(block).double(), batch.first_sequence(torch.float64)
    generator = torch.Generator().manual_seed(5)
    scale_JD = fold.shared(0.25 + 4 * torch.rand(fold.key_rows_JD.shape, generator=generator, dtype=torch.float64))
    with torch.no_grad():
        expected = run_block(exact, probe) - probe.hidden_SLD
        fold.apply(exact, scale_JD)
        found = run_block(exact, probe) - probe.hidden_SLD
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_norm_that_adds_one_to_its_weight_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    refused = find_key_fold(*open_block(tiny_model("gemma3"), tmp_path))
    assert isinstance(refused, NoKeyFold)
    assert refused.modules == ("self_attn.q_norm", "self_attn.k_norm")
    assert "rescaling self_attn.k_norm against self_attn.q_norm changes the block's output" in refused.reason


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_queries_that_are_scaled_on_their_way_are_refused(tiny_model: MakeModel, tmp_path: Path, family: str) -> None:
    refused = find_key_fold(*open_block(tiny_model(family), tmp_path))
    assert isinstance(refused, NoKeyFold)
    assert refused.reason.startswith("its queries are not what one of its linears or norms gives out")


def test_without_rope_every_channel_has_a_scale_of_its_own(tiny_model: MakeModel, tmp_path: Path) -> None:
    block, batch = open_block(tiny_model("llama"), tmp_path)
    cos_SLD, sin_SLD = batch.kwargs["position_embeddings"]
    batch.kwargs["position_embeddings"] = (torch.ones_like(cos_SLD), torch.zeros_like(sin_SLD))
    fold = find_key_fold(block, batch)
    assert isinstance(fold, KeyFold)
    assert fold.partner_D.tolist() == list(range(16))
    assert not fold.is_shared


def test_attention_that_cannot_be_watched_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    assert find_key_fold(*open_block(tiny_model("llama"), tmp_path, "sdpa")) == NoKeyFold(UNSEEN)
