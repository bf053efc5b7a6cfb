"""Every method on every family of decoders: it runs, its transforms leave the model's function as it was, and
transformers loads what it wrote and computes what was simulated."""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import yaml
from architectures import ARCHITECTURES, MIXTURES, VOCABULARY, MakeModel
from torch import Tensor, nn

from quantpipe.errors import RecipeError
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.quantize import SOLVERS, TRANSFORMS
from quantpipe.quantize.by_recipe import Quantization, open_model, quantize_model
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.transforms.transform import Transform, TransformInput, TransformRecord
from quantpipe.quantize.writing import write_quantized
from quantpipe.recipe.quantize_section import QuantizeSection
from quantpipe.report import Reporter

TOKEN_IDS = np.random.default_rng(0).integers(3, VOCABULARY, (4, 32))
PROBE_IDS = torch.from_numpy(np.random.default_rng(1).integers(3, VOCABULARY, (2, 16)))

W4A16 = {"name": "w4a16", "group_size": 32}
W8A16 = {"name": "w8a16"}
GPTQ = {"solver": {"name": "gptq"}, "scheme": W4A16}
# Method -> the `quantize` section of a recipe.
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"solver": {"name": "rtn"}, "scheme": W4A16},
    "rtn weighted, 3 bits": {"solver": {"name": "rtn", "scales": "hessian"}, "scheme": {**W4A16, "name": "w3a16"}},
    "rtn, second block and head in 8 bits": {
        "solver": {"name": "rtn", "scales": "mse"},
        "scheme": W4A16,
        "overrides": [{"modules": ["re:(?!.*experts).*layers[.]1[.].*", "lm_head"], "scheme": W8A16}],
        "ignore": [],
    },
    "rtn, bits by sensitivity": {
        "solver": {"name": "rtn", "scales": "hessian"},
        "scheme": W4A16,
        "allocate": {"scheme": W8A16, "average_bits": 6.5, "num_tokens": 64},
    },
    "gptq": GPTQ,
    "gptq both": {**GPTQ, "solver": {"name": "gptq", "propagate": "both"}},
    "awq": {"solver": {"name": "rtn"}, "scheme": W4A16, "transforms": [{"name": "awq"}]},
    "awq gptq": {**GPTQ, "transforms": [{"name": "awq"}]},
    "smoothquant w8a8": {
        "solver": {"name": "rtn"},
        "scheme": {"name": "w8a8"},
        "transforms": [{"name": "smoothquant"}],
    },
    "rotate gptq": {**GPTQ, "transforms": [{"name": "rotate"}]},
    "k_smooth kv": {
        "solver": {"name": "rtn"},
        "scheme": W4A16,
        "transforms": [{"name": "k_smooth"}],
        "kv_cache": "int8_static",
    },
}
# transformers does not load experts with 8-bit activations, so they get a scheme of their own.
EXPERTS_IN_8_BITS = [{"modules": ["re:.*[.]experts[.].*"], "scheme": W8A16}]
# What OPT's MLP reads has two dimensions, of which transformers rounds all tokens by one scale.
OPT_MLP_IN_8_BITS = [
    {"modules": [f"re:model[.]decoder[.]layers[.][0-9]+[.]{leaf}$" for leaf in ("fc1", "fc2")], "scheme": W8A16}
]
_FLAT_INPUTS = (
    r"^quantize\.scheme: model\.decoder\.layers\.0\.fc1 is to be w8a8, but transformers would round all tokens that it "
    r"reads by one scale instead of each by its own; store such linears in another: overrides: \[\{modules: "
    r"\['re:model\[\.\]decoder\[\.\]layers\[\.\]\[0-9\]\+\[\.\]fc1\$', "
    r"'re:model\[\.\]decoder\[\.\]layers\[\.\]\[0-9\]\+\[\.\]fc2\$'\], scheme: w8a16\}\], or list them under "
    r"quantize\.ignore$"
)
_EXPERTS = (
    r"^quantize\.scheme: model\.layers\.0\.mlp\.experts\.0\.gate_proj is to be w8a8, in which transformers does not "
    r"load experts; store them in another: "
    r"overrides: \[\{modules: \['re:\.\*\[\.\]experts\[\.\]\.\*'\], scheme: w8a16\}\]$"
)
# Method, family -> why it is refused there, in one line and before anything long.
REFUSED = {
    (
        "rotate gptq",
        "gemma3",
    ): r"rotate: model\.layers\.0\.post_attention_layernorm scales channels on their way into the "
    "residual stream, which no rotation passes through",
    **{("smoothquant w8a8", family): _FLAT_INPUTS for family in ("opt", "gpt2")},
    **{("smoothquant w8a8", family): _EXPERTS for family in MIXTURES},
}
# Method, family -> the overrides that the refusal advises, with which it is not refused.
ADVISED: dict[tuple[str, str], list[dict[str, Any]]] = {
    **{("smoothquant w8a8", family): OPT_MLP_IN_8_BITS for family in ("opt", "gpt2")},
    **{("smoothquant w8a8", family): EXPERTS_IN_8_BITS for family in MIXTURES},
}


@dataclass
class Run:
    """What a method made of a family: all results, the artifact, and the parameters as a transform left them."""

    result: Quantization
    artifact: Artifact
    transformed: dict[str, Tensor]


def advised(method: str, family: str) -> dict[str, Any]:
    """The method with the overrides that its refusal for a family advises, or as it is where there are none."""
    overrides = ADVISED.get((method, family))
    return METHODS[method] if overrides is None else METHODS[method] | {"overrides": overrides}


def run(
    settings: Mapping[str, Any],
    base: Path,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    token_ids: npt.NDArray[np.int64] = TOKEN_IDS,
) -> Run:
    """Quantize the model of ``base`` and write its artifact, as the pipeline does."""
    section = QuantizeSection.model_validate(settings)
    kept: dict[str, Tensor] = {}
    for transform in section.transforms:
        monkeypatch.setitem(TRANSFORMS, transform.name, keeping(transform.name, kept))
    model = open_model(base)
    result = quantize_model(section, model, token_ids, work / "work", "0", Reporter(quiet=True))
    artifact = write_quantized(work / "artifact", model, result.model, result.targets, {})
    outside = {name: model.module.get_parameter(name) for name in model.outside()}
    return Run(result, artifact, kept | outside if kept else {})


def keeping(name: str, kept: dict[str, Tensor]) -> Any:
    """The factory of a transform that also keeps what it makes of each block's parameters."""
    factory = TRANSFORMS[name]

    def make(settings: Any, model: StreamedModel) -> Transform:
        transform = factory(settings, model)

        def apply(given: TransformInput) -> list[TransformRecord]:
            records = transform(given)
            kept.update({f"{given.name}.{leaf}": p.clone() for leaf, p in given.block.named_parameters()})
            return records

        return apply

    return make


@pytest.fixture(scope="module")
def original(tiny_model: MakeModel) -> Callable[..., tuple[nn.Module, Tensor]]:
    """Gives a copy of a family's model, unrolled and in float32, and its logits in float64."""
    made: dict[str, tuple[nn.Module, Tensor]] = {}

    def copied(module: nn.Module) -> nn.Module:
        return copy.deepcopy(module, {id(module.config): module.config})

    def model_of(family: str, **fields: Any) -> tuple[nn.Module, Tensor]:
        key = f"{family} {fields}"
        if key not in made:
            model = StreamedModel.open(tiny_model(family, **fields))
            stack = model.module.get_submodule(model.blocks.path)
            assert isinstance(stack, nn.ModuleList)
            for index in range(len(stack)):
                stack[index] = model.load_block(index).float()
            made[key] = model.module, logits(copied(model.module).double())
        module, logits_SLV = made[key]
        return copied(module), logits_SLV

    return model_of


def put(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give ``model`` parameters of its own, also where they were tied."""
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(value.float(), requires_grad=False))


def round_as_transformers(_module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Inputs rounded to 8 bits as compressed-tensors simulates it: a step is 1 / 127.5 of the largest magnitude, which
    is a token's own only where inputs have three dimensions."""
    x = args[0]
    assert x.ndim == 3
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return ((x / scale).round().clamp(-128, 127) * scale,)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=PROBE_IDS, use_cache=False).logits
    return found


def simulated(model: nn.Module, result: QuantizedModel) -> Tensor:
    """Logits of a model in which every quantized weight is replaced by what its integers mean."""
    put(model, result.tensors)
    put(model, result.added)
    put(model, {f"{name}.weight": weight.dequantized() for name, weight in result.weights.items()})
    for name, weight in result.weights.items():
        if weight.scheme.activation_bits is not None:
            model.get_submodule(name).register_forward_pre_hook(round_as_transformers)
    return logits(model)


def reloaded(artifact: Artifact) -> Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(artifact.folder, dtype=torch.float32).eval())


def test_every_transform_and_solver_is_among_the_methods() -> None:
    assert {each["name"] for settings in METHODS.values() for each in settings.get("transforms", [])} == set(TRANSFORMS)
    assert {settings["solver"]["name"] for settings in METHODS.values()} == set(SOLVERS)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("method", METHODS)
def test_method_runs_and_transformers_loads_its_artifact_with_equal_logits(
    tiny_model: MakeModel,
    original: Callable[..., tuple[nn.Module, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    method: str,
) -> None:
    base = tiny_model(family)
    if (method, family) in REFUSED:
        with pytest.raises(RecipeError, match=REFUSED[method, family]) as refused:
            run(METHODS[method], base, tmp_path, monkeypatch)
        assert not list(tmp_path.iterdir())
        if (method, family) not in ADVISED:
            return
        advice = re.search(r"overrides: (\[\{.*?\}\])", str(refused.value))
        assert advice is not None
        assert yaml.safe_load(advice[1]) == [{**each, "scheme": "w8a16"} for each in ADVISED[method, family]]
    done = run(advised(method, family), base, tmp_path, monkeypatch)
    assert done.result.model.weights.keys() == done.result.targets.schemes.keys()
    assert (done.result.kv is not None) == ("kv_cache" in METHODS[method])
    assert verify(done.artifact.folder) == []
    if done.transformed:
        model, expected = original(family)
        put(model, done.transformed)
        # the transformed weights were rounded to float32
        tolerance = 2e-5 * float(expected.abs().max())
        torch.testing.assert_close(logits(model.double()), expected, rtol=0, atol=tolerance)
    # The order of float32 sums differs; where activations are rounded, that moves some to the next of 255 steps.
    tolerance = 2e-2 if METHODS[method]["scheme"]["name"] == "w8a8" else 1e-4
    expected = simulated(original(family)[0], done.result.model)
    torch.testing.assert_close(reloaded(done.artifact), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("method", ["gptq", "gptq both", "awq gptq", "smoothquant w8a8", "rotate gptq"])
def test_experts_that_saw_no_tokens_are_rounded_to_nearest_and_told_of(
    tiny_model: MakeModel,
    original: Callable[..., tuple[nn.Module, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
) -> None:
    base = tiny_model("mixtral", num_local_experts=16)
    done = run(advised(method, "mixtral"), base, tmp_path, monkeypatch, TOKEN_IDS[:1, :4])  # reaches at most 8 of 16
    expert = {layer.name: layer for layer in done.result.model.layers if ".experts." in layer.name}
    assert len(expert) == 2 * 16 * 3
    unseen = [layer for layer in expert.values() if layer.num_tokens == 0]
    assert len(unseen) >= 2 * 8 * 3
    assert all(layer.error_after == pytest.approx(layer.error_before) for layer in unseen)
    expected = simulated(original("mixtral", num_local_experts=16)[0], done.result.model)
    torch.testing.assert_close(reloaded(done.artifact), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_documents_packed_apart(method: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    """The statistics are others than with attention across documents; everything is found and proved as it was."""
    section = QuantizeSection.model_validate(METHODS[method])
    apart = np.tile(np.concatenate([np.arange(12), np.arange(20)]), (len(TOKEN_IDS), 1))
    quiet = Reporter(quiet=True)

    def quantized(name: str, positions: npt.NDArray[np.int64] | None) -> QuantizedModel:
        model = open_model(tiny_model("llama"))
        return quantize_model(section, model, TOKEN_IDS, tmp_path / name, "0", quiet, positions).model

    crossing, separate = quantized("crossing", None), quantized("separate", apart)
    assert [record.linears for record in separate.transformed] == [record.linears for record in crossing.transformed]
    assert [layer.num_tokens for layer in separate.layers] == [layer.num_tokens for layer in crossing.layers]
    errors = [[layer.error_after for layer in result.layers] for result in (separate, crossing)]
    assert errors[0] != errors[1] or section.solver.name == "rtn"


def test_a_model_that_cannot_keep_documents_apart_is_refused_before_any_work(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    section = QuantizeSection.model_validate(METHODS["gptq"])
    positions = np.tile(np.arange(TOKEN_IDS.shape[1] // 2), (len(TOKEN_IDS), 2))
    with pytest.raises(RecipeError, match="packing 'separate': OPTForCausalLM lets one document"):
        quantize_model(
            section, open_model(tiny_model("opt")), TOKEN_IDS, tmp_path / "work", "0", Reporter(quiet=True), positions
        )
    assert not (tmp_path / "work").exists()
