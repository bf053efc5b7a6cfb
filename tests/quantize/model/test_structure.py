import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, MIXTURES, MakeModel, config_of, random_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quantpipe.formats.artifact import Artifact
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.structure import UnrolledExperts, stored_names, unroll

TOKEN_IDS = torch.arange(3, 35).reshape(2, 16)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=TOKEN_IDS, use_cache=False).logits
    return found


def eager(name: str) -> nn.Module:
    """A mixture in float64, which the fast implementations of experts do not have."""
    return random_model(name, experts_implementation="eager").double()


@pytest.mark.parametrize("name", MIXTURES)
def test_unrolled_experts_compute_what_stacked_ones_do_in_float64(name: str) -> None:
    model = eager(name)
    expected = logits(model)
    unroll(model)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    assert isinstance(experts, UnrolledExperts)
    assert isinstance(experts.get_submodule("3.down_proj"), nn.Linear)
    torch.testing.assert_close(logits(model), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", MIXTURES)
def test_unrolling_on_the_meta_device_gives_the_same_parameters(name: str) -> None:
    real, meta = random_model(name), copy.deepcopy(random_model(name)).to("meta")
    unroll(real)
    unroll(meta)
    shapes = {key: parameter.shape for key, parameter in real.named_parameters()}
    assert shapes == {key: parameter.shape for key, parameter in meta.named_parameters()}
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_a_model_without_experts_is_not_touched() -> None:
    model = random_model("llama")
    modules = list(model.modules())
    unroll(model)
    assert list(model.modules()) == modules


def test_experts_that_compute_something_else_stay_stacked() -> None:
    model = eager("mixtral")
    experts = model.get_submodule("model.layers.1.mlp.experts")
    usual = type(experts)

    class Clamped(usual):  # type: ignore[misc, valid-type]
        def forward(self, hidden: Tensor, index: Tensor, share: Tensor) -> Any:
            return usual.forward(self, hidden.clamp(-1, 1), index, share)

    experts.__class__ = Clamped
    unroll(model)
    assert isinstance(model.get_submodule("model.layers.0.mlp.experts"), UnrolledExperts)
    assert model.get_submodule("model.layers.1.mlp.experts") is experts


@pytest.mark.parametrize(
    ("name", "parameter", "stored"),
    [
        (
            "mixtral",
            "model.layers.1.mlp.experts.2.up_proj.weight",
            "model.layers.1.block_sparse_moe.experts.2.w3.weight",
        ),
        ("mixtral", "model.layers.0.mlp.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.experts.3.down_proj.weight"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("llama", "model.norm.weight", "model.norm.weight"),
    ],
)
def test_parameters_are_found_under_the_names_their_family_stores(
    tiny_model: MakeModel, name: str, parameter: str, stored: str
) -> None:
    names = StreamedModel.open(tiny_model(name)).names
    assert names.tensor(parameter) == stored
    assert names.module(parameter.removesuffix(".weight")) == stored.removesuffix(".weight")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_found_in_its_shape_and_the_streamed_model_computes_the_same(
    tiny_model: MakeModel, name: str
) -> None:
    folder = tiny_model(name)
    model = StreamedModel.open(folder)
    for key, parameter in model.module.named_parameters():
        assert model.artifact.stored[key].spec.shape == parameter.shape
    with model.running() as running:
        # two ways to the same float32 sums
        torch.testing.assert_close(
            logits(running), logits(AutoModelForCausalLM.from_pretrained(folder)), rtol=1e-4, atol=1e-5
        )


def test_a_body_stored_without_its_prefix_is_found(tiny_model: MakeModel, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_model("qwen2")
    tensors = {name.removeprefix("model."): each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = StreamedModel.open(tmp_path)
    assert model.names.tensor("model.norm.weight") == "norm.weight"
    with model.running() as running:
        assert torch.equal(logits(running), logits(AutoModelForCausalLM.from_pretrained(folder)))


def test_a_parameter_that_is_stored_nowhere_has_no_name(tiny_model: MakeModel) -> None:
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config_of("llama", attention_bias=True))
    names = stored_names(model, Artifact.open(tiny_model("llama")))
    assert "model.layers.0.self_attn.q_proj.weight" in names.of
    assert "model.layers.0.self_attn.q_proj.bias" not in names.of


def test_what_config_json_says_is_named_as_each_reader_knows_it(tiny_model: MakeModel) -> None:
    names = StreamedModel.open(tiny_model("mixtral")).names
    assert names.declared({"lm_head": 1, "model.layers.0.mlp.gate": 2}) == {
        "lm_head": 1,
        "model.layers.0.block_sparse_moe.gate": 2,
        "model.layers.0.mlp.gate": 2,
    }
    assert names.both(["lm_head", "model.layers.0.mlp.gate"]) == [
        "lm_head",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.mlp.gate",
    ]


def test_results_are_read_by_stored_names_only_when_asked_for(tiny_model: MakeModel) -> None:
    names = StreamedModel.open(tiny_model("mixtral")).names
    renamed = names.of_modules({"model.layers.0.mlp.experts.1.gate_proj": 1, "model.layers.0.self_attn.q_proj": 2})
    assert dict(renamed) == {"model.layers.0.block_sparse_moe.experts.1.w1": 1, "model.layers.0.self_attn.q_proj": 2}
    assert dict(names.of_tensors({"model.layers.1.mlp.gate.weight": 3})) == {
        "model.layers.1.block_sparse_moe.gate.weight": 3
    }
