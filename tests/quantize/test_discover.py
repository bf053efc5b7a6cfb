from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import w4a16, w8a8
from quantpipe.quantize.discover import find_blocks, find_targets, shared_input_groups
from quantpipe.quantize.loading import load_base_model


@pytest.fixture(scope="module")
def model(random_llama: Callable[..., Path]) -> nn.Module:
    return load_base_model(random_llama())


def test_llama_blocks_and_linears_are_found(model: nn.Module) -> None:
    blocks = find_blocks(model)
    targets = find_targets(model, blocks, ["lm_head"], w8a8())
    assert (blocks.path, len(blocks.blocks)) == ("model.layers", 2)
    assert len(targets.linears) == 14
    assert targets.ignored == ("lm_head",)
    assert set(targets.inside("model.layers.1")) >= {"self_attn.q_proj", "mlp.down_proj"}


def test_model_without_blocks_is_refused() -> None:
    with pytest.raises(RecipeError, match="no stack of decoder blocks"):
        find_blocks(nn.Sequential(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        ([], "lm_head lies outside the decoder blocks"),
        (["lm_head", "lm_hat"], "'lm_hat' names no Linear of the model"),
        (["lm_head", "re:.*layers.*"], "nothing is left to quantize"),
        (["lm_head", "model.layers.0.self_attn.k_proj"], "ignore all or none"),
        (["lm_head", "re:.*gate_proj"], "ignore all or none"),
    ],
    ids=["head", "unknown", "everything", "split qkv", "split gate_up"],
)
def test_unusable_ignore_lists_are_refused(model: nn.Module, ignore: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        find_targets(model, find_blocks(model), ignore, w8a8())


def test_whole_layers_and_fused_sets_may_be_ignored(model: nn.Module) -> None:
    ignore = ["lm_head", r"re:model\.layers\.0\..*", r"re:.*\.(q|k|v)_proj"]
    targets = find_targets(model, find_blocks(model), ignore, w8a8())
    assert len(targets.linears) == 4


def test_group_size_is_checked_before_anything_runs(random_llama: Callable[..., Path]) -> None:
    odd = load_base_model(random_llama(hidden_size=96, intermediate_size=128, head_dim=24))
    with pytest.raises(RecipeError, match=r"64 does not divide the 96 input features of model\.layers\.0"):
        find_targets(odd, find_blocks(odd), ["lm_head"], w4a16(64))


def test_weights_that_are_not_linears_are_refused_not_skipped(model: nn.Module) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 2)
            self.stacked = nn.Parameter(torch.zeros(2, 4, 4))

    moe = nn.Module()
    moe.layers = nn.ModuleList([Experts()])
    with pytest.raises(RecipeError, match=r"layers\.0\.stacked is a 3-D weight"):
        find_targets(moe, find_blocks(moe), [], w8a8())


def test_linears_are_grouped_by_the_tensor_they_read() -> None:
    x, y = torch.zeros(2, 4), torch.zeros(2, 4)
    assert shared_input_groups([("q", x), ("k", x), ("o", y), ("up", x)]) == [["q", "k"], ["o"], ["up"]]
