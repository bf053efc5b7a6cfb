from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantpipe.errors import RecipeError
from quantpipe.quantize.by_recipe import open_model
from quantpipe.quantize.model.documents_apart import check_documents_apart


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt_neox", "mixtral", "qwen3_moe"]
)
def test_models_that_mask_by_position_pass(tiny_model: Callable[..., Path], name: str) -> None:
    check_documents_apart(open_model(tiny_model(name)))


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_models_whose_mask_ignores_positions_are_refused(tiny_model: Callable[..., Path], name: str) -> None:
    message = r"^calibration: packing 'separate': OPTForCausalLM lets one document of a sequence reach the next \(in "
    with pytest.raises(RecipeError, match=message + r"model\.decoder\.layers\.0\); use packing 'concatenate'"):
        check_documents_apart(open_model(tiny_model(name)))


def test_a_leak_in_a_later_block_of_another_kind_is_found(tiny_model: Callable[..., Path]) -> None:
    """A block that adds the token before, as a convolution does; the first block is as always."""
    model = open_model(tiny_model("llama"))
    norm = model.blocks.blocks[1].get_submodule("post_attention_layernorm")
    kind = type("Convolved", (type(norm),), {"forward": _with_token_before(type(norm))})
    norm.__class__ = kind
    with pytest.raises(RecipeError, match=r"reach the next \(in model\.layers\.1\)"):
        check_documents_apart(model)


def _with_token_before(norm: type[Any]) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_SLD: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = norm.forward(self, hidden_SLD)
        return normed + normed.roll(1, dims=1)

    return forward


def test_a_model_without_position_ids_is_refused(tiny_model: Callable[..., Path]) -> None:
    model = open_model(tiny_model("llama"))
    forward = model.module.forward
    model.module.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)  # type: ignore[method-assign]
    with pytest.raises(RecipeError, match="LlamaForCausalLM takes no position ids; use packing"):
        check_documents_apart(model)


def test_embeddings_that_count_from_the_start_of_a_sequence_are_refused(tiny_model: Callable[..., Path]) -> None:
    model = open_model(tiny_model("llama"))
    embedding: Any = model.module.get_input_embeddings()  # type: ignore[operator]
    embedding.register_forward_hook(lambda _module, _args, x_SLD: x_SLD.cumsum(1))
    with pytest.raises(RecipeError, match="gives tokens other embeddings behind another document"):
        check_documents_apart(model)
