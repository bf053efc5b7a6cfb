from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, MIXTURES, MakeModel, config_of
from torch import nn

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.structure import unroll
from quantpipe.quantize.targets.discover import (
    Override,
    Targets,
    check_schemes,
    find_blocks,
    find_targets,
    shared_input_groups,
)

W8A16 = weight_only(8, None)
EXPERTS = r"re:.*[.]experts[.].*"


@pytest.fixture(scope="module")
def model(random_llama: Callable[..., Path]) -> nn.Module:
    return StreamedModel.open(random_llama()).module


def meta_model(name: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config_of(name))
    unroll(model)
    return model


def targets_of(
    model: nn.Module, scheme: WeightScheme, ignore: Sequence[str] = ("lm_head",), overrides: Sequence[Override] = ()
) -> Targets:
    return find_targets(model, find_blocks(model), ignore, scheme, overrides)


def test_llama_blocks_and_linears_are_found(model: nn.Module) -> None:
    blocks = find_blocks(model)
    targets = targets_of(model, w8a8())
    assert (blocks.path, len(blocks.blocks)) == ("model.layers", 2)
    assert len(targets.schemes) == 14
    assert targets.ignored == ("lm_head",)
    assert set(targets.inside("model.layers.1")) >= {"self_attn.q_proj", "mlp.down_proj"}
    assert targets.outside(blocks.path) == {}


def test_model_without_blocks_is_refused() -> None:
    with pytest.raises(RecipeError, match="no stack of decoder blocks"):
        find_blocks(nn.Sequential(nn.Linear(4, 4)))


def test_more_experts_than_blocks_are_not_taken_for_the_blocks() -> None:
    block = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4) for _ in range(5)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    assert find_blocks(model).path == "layers"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_weight_of_every_family_is_a_target_or_is_told_of(tiny_model: MakeModel, name: str) -> None:
    model = StreamedModel.open(tiny_model(name))
    targets = find_targets(model.module, model.blocks, ["lm_head"], w4a16(32))
    for index in range(len(model.blocks.blocks)):
        path = model.blocks.name(index)
        matrices = {
            key.removesuffix(".weight") for key, p in model.blocks.blocks[index].named_parameters() if p.ndim > 1
        }
        routers = {key.removeprefix(f"{path}.") for key in targets.ignored if key.startswith(path)}
        assert set(targets.inside(path)) | routers == matrices
        assert routers == ({"mlp.gate"} if name in MIXTURES else set())


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        ([], "lm_head lies outside the decoder blocks"),
        (["lm_head", "lm_hat"], "'lm_hat' names no Linear of the model; did you mean 'lm_head'"),
        (["lm_head", "re:.*experts.*"], "names no Linear of the model; names are like model.layers.0"),
        (["lm_head", "re:.*layers.*"], "nothing is left to quantize"),
        (["lm_head", "model.layers.0.self_attn.k_proj"], "ignore all or none"),
        (["lm_head", "re:.*gate_proj"], "ignore all or none"),
    ],
    ids=["head", "unknown", "unknown regex", "everything", "split qkv", "split gate_up"],
)
def test_unusable_ignore_lists_are_refused(model: nn.Module, ignore: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        targets_of(model, w8a8(), ignore)


def test_whole_layers_and_fused_sets_may_be_ignored(model: nn.Module) -> None:
    ignore = ["lm_head", r"re:model\.layers\.0\..*", r"re:.*\.(q|k|v)_proj"]
    assert len(targets_of(model, w8a8(), ignore).schemes) == 4


def test_of_overrides_that_name_a_linear_the_last_counts(model: nn.Module) -> None:
    overrides = [(("re:.*down_proj",), W8A16), (("model.layers.1.mlp.down_proj",), w4a16(64))]
    schemes = targets_of(model, w4a16(32), overrides=overrides).schemes
    assert schemes["model.layers.0.mlp.down_proj"] == W8A16
    assert schemes["model.layers.1.mlp.down_proj"] == w4a16(64)
    assert schemes["model.layers.1.self_attn.o_proj"] == w4a16(32)


@pytest.mark.parametrize(
    ("modules", "scheme", "message"),
    [
        (("model.layers.0.mlp.down_prj",), W8A16, "did you mean 'model.layers.0.mlp.down_proj'"),
        (("lm_head",), W8A16, r"quantize.overrides\[0\].modules\[0\]: 'lm_head' names only what is ignored"),
        (
            ("re:.*q_proj",),
            W8A16,
            r"q_proj is to be w8a16 channel but model\.layers\.0\.self_attn\.k_proj w4a16 g32; vLLM runs",
        ),
    ],
    ids=["unknown", "ignored", "split qkv"],
)
def test_unusable_overrides_are_refused(
    model: nn.Module, modules: tuple[str, ...], scheme: WeightScheme, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        targets_of(model, w4a16(32), overrides=[(modules, scheme)])


def test_the_head_is_quantized_only_where_an_override_gives_it_8_bits(model: nn.Module) -> None:
    targets = targets_of(model, w4a16(32), [], [(("lm_head",), W8A16)])
    assert targets.outside("model.layers") == {"lm_head": W8A16}
    assert targets.ignored == ()
    # the fixture ties its embeddings
    assert "lm_head shares the embedding's weight" in targets.notes[0]
    with pytest.raises(RecipeError, match="lm_head lies outside the decoder blocks and cannot be stored as w4a16"):
        targets_of(model, w4a16(32), [], [(("lm_head",), w4a16(32))])


def test_an_untied_head_has_no_note(tiny_model: MakeModel) -> None:
    model = StreamedModel.open(tiny_model("llama")).module
    assert targets_of(model, w4a16(32), [], [(("lm_head",), W8A16)]).notes == ()


def test_group_sizes_that_do_not_fit_are_refused_with_those_that_do(random_llama: Callable[..., Path]) -> None:
    odd = StreamedModel.open(random_llama(hidden_size=96, intermediate_size=128, head_dim=24)).module
    message = (
        r"64 does not divide the 96 input features of model\.layers\.0\.self_attn\.q_proj and of 11 more linears; "
        "use 32 or channel"
    )
    with pytest.raises(RecipeError, match=message):
        targets_of(odd, w4a16(64))
    # down_proj reads 128
    few = targets_of(odd, W8A16, overrides=[(("re:.*down_proj",), w4a16(64))])
    assert few.schemes["model.layers.0.mlp.down_proj"].group_size == 64


def test_weights_that_are_not_linears_are_refused_not_skipped() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 2)
            self.stacked = nn.Parameter(torch.zeros(2, 4, 4))

    moe = nn.ModuleDict({"layers": nn.ModuleList([Experts()])})
    with pytest.raises(RecipeError, match=r"layers\.0\.stacked is a 3-D weight"):
        find_targets(moe, find_blocks(moe), [], w8a8())


def test_conv1d_that_no_reader_loads_quantized_is_refused() -> None:
    from transformers.pytorch_utils import Conv1D

    block = nn.ModuleDict({"proj": Conv1D(4, 4), "out": nn.Linear(4, 4)})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    with pytest.raises(RecipeError, match=r"layers\.0\.proj\.weight is a 2-D weight of a Conv1D"):
        find_targets(model, find_blocks(model), [], w8a8())


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_stay_in_floating_point_and_may_be_listed(name: str) -> None:
    model = meta_model(name)
    gates = ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")
    assert targets_of(model, w4a16(32)).ignored == ("lm_head", *gates)
    assert targets_of(model, w4a16(32), ["lm_head", "re:.*gate$"]).ignored == ("lm_head", *gates)


@pytest.mark.parametrize(
    ("scheme", "ignore", "overrides", "message"),
    [
        (w4a16(32), [EXPERTS], [], r"experts\.0\.gate_proj is ignored, but transformers drops experts"),
        (w8a8(), [], [], r"experts\.0\.gate_proj is to be w8a8, in which transformers does not load experts"),
        (weight_only(4, 32, symmetric=False), [], [], "is to be w4a16 g32 asymmetric, in which transformers does not"),
        (w4a16(32), [], [(("re:.*1.*experts.*",), W8A16)], "transformers loads all experts of a model by one scheme"),
    ],
    ids=["ignored", "activations", "zero points", "mixed"],
)
def test_experts_that_transformers_would_not_load_are_refused(
    scheme: WeightScheme, ignore: list[str], overrides: list[Override], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        targets_of(meta_model("mixtral"), scheme, ["lm_head", *ignore], overrides)


def test_experts_may_be_stored_in_a_scheme_of_their_own() -> None:
    targets = targets_of(meta_model("qwen3_moe"), w8a8(), overrides=[((EXPERTS,), W8A16)])
    assert targets.schemes["model.layers.1.mlp.experts.3.down_proj"] == W8A16
    assert targets.schemes["model.layers.1.self_attn.o_proj"] == w8a8()


def test_schemes_of_an_allocation_are_held_to_the_same_rules(model: nn.Module) -> None:
    schemes = dict(targets_of(model, w4a16(32)).schemes)
    check_schemes(model, schemes | {"model.layers.0.mlp.down_proj": W8A16}, [])
    with pytest.raises(RecipeError, match=r"gate_proj.* as one matrix"):
        check_schemes(model, schemes | {"model.layers.0.mlp.up_proj": W8A16}, [])


def test_linears_are_grouped_by_the_tensor_they_read() -> None:
    x, y = torch.zeros(2, 4), torch.zeros(2, 4)
    assert shared_input_groups([("q", x), ("k", x), ("o", y), ("up", x)]) == [["q", "k"], ["o"], ["up"]]
