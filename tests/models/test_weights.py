"""A folder is refused where it lacks a tensor, has one in another shape, or has one the decoder would not read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only
from quantpipe.models import describe
from quantpipe.models.weights import check_tensors, load_linear

MakeFolder = Callable[..., Path]


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def check(folder: Path) -> None:
    artifact = Artifact.open(folder)
    check_tensors(describe(artifact), artifact)


def test_a_whole_folder_passes(make_folder: MakeFolder) -> None:
    check(make_folder(attention_bias=True, mlp_bias=True))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_tensor_is_named(make_folder: MakeFolder, name: str) -> None:
    folder = make_folder()
    rewrite(folder, lambda tensors: tensors.__delitem__(name))
    with pytest.raises(ArtifactError, match=f"tensor {name} is missing"):
        check(folder)


def test_tensor_in_another_shape_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder()
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(8)}))
    with pytest.raises(ArtifactError, match=r"model\.norm\.weight has shape \[8\]; config\.json asks for \[64\]"):
        check(folder)


def test_tensor_that_would_be_ignored_is_named(make_folder: MakeFolder) -> None:
    folder = make_folder()
    name = "model.layers.0.self_attn.q_norm.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(ArtifactError, match=f"tensor {name} has no place in the llama decoder"):
        check(folder)


def test_bias_that_the_config_does_not_mention_is_not_ignored(make_folder: MakeFolder) -> None:
    folder = make_folder({"attention_bias": False}, attention_bias=True)
    with pytest.raises(ArtifactError, match=r"q_proj\.bias|k_proj\.bias"):
        check(folder)


def test_tensors_of_old_checkpoints_that_are_recomputed_are_allowed(make_folder: MakeFolder) -> None:
    folder = make_folder(tie_word_embeddings=True)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, change)
    check(folder)


@pytest.mark.parametrize(
    "scheme",
    [w4a16(32), weight_only(3, None), weight_only(4, 32, symmetric=False), weight_only(3, 32, symmetric=False), w8a8()],
    ids=lambda scheme: scheme.label,
)
def test_quantized_linear_reads_back_as_it_was_encoded(
    make_folder: MakeFolder, tmp_path: Path, scheme: WeightScheme
) -> None:
    base = Artifact.open(make_folder())
    module = "model.layers.0.mlp.down_proj"
    weight_NK = base.tensor(f"{module}.weight")
    zero_NG = None
    if scheme.symmetric:
        scale_NG = absmax_scale(weight_NK, scheme, torch.bfloat16)
    else:
        scale_NG, zero_NG = minmax_scale(weight_NK, scheme, torch.bfloat16)
    weight = QuantWeight(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, scheme, zero_NG)
    config = quantization_config({module: scheme}, ["lm_head"])
    artifact = write_artifact(tmp_path / "quantized", base, {module: weight}, config, {})
    description = describe(artifact)
    check_tensors(description, artifact)
    read = load_linear(artifact, description.layers[0].mlp.down)
    assert read.scheme == scheme
    assert torch.equal(read.dequantized(), weight.dequantized())
