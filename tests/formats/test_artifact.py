import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact, matches, require_intact, verify
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.digests import Hashing
from quantpipe.formats.layout import absmax_scale, encode, minmax_scale
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8, weight_only

MODULE = "model.layers.1.mlp.down_proj"


@pytest.fixture(params=[w4a16(32), weight_only(3, 32, symmetric=False), w8a8()], ids=lambda scheme: scheme.label)
def artifact(request: pytest.FixtureRequest, random_llama: Callable[..., Path], tmp_path: Path) -> Artifact:
    """One linear quantized, the rest as it was."""
    scheme: WeightScheme = request.param
    base = Artifact.open(random_llama(torch.bfloat16))
    weight_NK = base.tensor(f"{MODULE}.weight")
    scale_NG, zero_NG = absmax_scale(weight_NK, scheme, weight_NK.dtype), None
    if not scheme.symmetric:
        scale_NG, zero_NG = minmax_scale(weight_NK, scheme, weight_NK.dtype)
    weights = {MODULE: QuantWeight(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, scheme, zero_NG)}
    return write_artifact(
        tmp_path / "artifact", base, weights, quantization_config(dict.fromkeys(weights, scheme), ["lm_head"]), {}
    )


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def forget_manifest(folder: Path) -> None:
    (folder / "quantpipe.json").unlink()


def test_every_deleted_tensor_is_noticed(artifact: Artifact) -> None:
    tensors = load_file(artifact.folder / "model.safetensors")
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, artifact.folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ArtifactError, match=f"tensor {name} is missing"):
            Artifact.open(artifact.folder)
        assert f"tensor {name} is missing; the manifest lists it" in verify(artifact.folder)


def test_deleted_quantized_tensor_is_noticed_without_a_manifest(artifact: Artifact) -> None:
    forget_manifest(artifact.folder)
    for suffix in artifact.schemes[MODULE].tensors(64, 128, "BF16"):
        saved = load_file(artifact.folder / "model.safetensors")
        change_tensors(artifact.folder, lambda tensors, name=f"{MODULE}.{suffix}": tensors.pop(name))
        with pytest.raises(ArtifactError, match=f"{MODULE}.{suffix} is missing"):
            Artifact.open(artifact.folder)
        save_file(saved, artifact.folder / "model.safetensors", metadata={"format": "pt"})


def test_flipped_byte_in_any_tensor_is_noticed(artifact: Artifact) -> None:
    path = artifact.folder / "model.safetensors"
    original = path.read_bytes()
    for position in (len(original) - 1, len(original) - 5000, len(original) // 2):
        damaged = bytearray(original)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert any("differs from its digest" in problem for problem in verify(artifact.folder))
    path.write_bytes(original)
    assert verify(artifact.folder) == []


def test_changed_config_and_missing_file_are_noticed(artifact: Artifact) -> None:
    config = artifact.folder / "config.json"
    config.write_text(config.read_text().replace("bfloat16", "float16"))
    (artifact.folder / "generation_config.json").unlink()
    problems = verify(artifact.folder)
    assert "file config.json differs from its digest in the manifest" in problems
    assert "file generation_config.json is missing; the manifest lists it" in problems


def test_stray_tensor_is_noticed(artifact: Artifact) -> None:
    change_tensors(artifact.folder, lambda tensors: tensors.update({"stray": torch.ones(1)}))
    assert verify(artifact.folder) == ["tensor stray is not in the manifest"]


def test_wrong_shape_is_named_with_both_shapes(artifact: Artifact) -> None:
    forget_manifest(artifact.folder)
    name = f"{MODULE}.weight_scale"
    change_tensors(artifact.folder, lambda tensors: tensors.update({name: tensors[name][:32].clone()}))
    with pytest.raises(ArtifactError, match=rf"{name} is BF16 \[32, .* stores BF16 \[64, "):
        Artifact.open(artifact.folder)


def test_truncated_file_is_refused(artifact: Artifact) -> None:
    path = artifact.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        Artifact.open(artifact.folder)


def test_quantized_tensors_without_a_declaration_are_refused(artifact: Artifact) -> None:
    forget_manifest(artifact.folder)
    config = json.loads((artifact.folder / "config.json").read_text())
    del config["quantization_config"]
    (artifact.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="declares no scheme"):
        Artifact.open(artifact.folder)


def test_other_quantization_formats_are_refused_by_name(artifact: Artifact) -> None:
    config = json.loads((artifact.folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "bitsandbytes"
    (artifact.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="'bitsandbytes' cannot be served; known: compressed-tensors"):
        Artifact.open(artifact.folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_incomplete_folder_is_refused(artifact: Artifact, missing: str) -> None:
    (artifact.folder / missing).unlink()
    with pytest.raises(ArtifactError, match=missing):
        Artifact.open(artifact.folder)


def test_verify_needs_a_manifest(random_llama: Callable[..., Path]) -> None:
    with pytest.raises(ArtifactError, match="nothing to verify against"):
        verify(random_llama())


def test_digest_follows_what_is_served_only(artifact: Artifact) -> None:
    before = artifact.digest
    forget_manifest(artifact.folder)
    assert Artifact.open(artifact.folder).digest == before
    save_file({"model.layers.0.self_attn.k_scale": torch.ones(2)}, artifact.folder / "kv_scales.safetensors")
    with_scales = Artifact.open(artifact.folder).digest
    assert with_scales != before
    (artifact.folder / "kv_scales.safetensors").unlink()
    change_tensors(artifact.folder, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert Artifact.open(artifact.folder).digest != before


def test_targets_match_by_class_name_and_regex() -> None:
    assert matches("model.layers.0.mlp.up_proj", "Linear")
    assert matches("lm_head", "lm_head")
    assert not matches("lm_head2", "lm_head")
    assert matches("model.layers.0.mlp.up_proj", r"re:.*\.up_proj$")
    assert not matches("model.layers.0.mlp.up_proj", "re:up_proj")


def test_file_that_changes_under_an_open_artifact_is_refused(artifact: Artifact) -> None:
    change_tensors(artifact.folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ArtifactError, match="was changed while it was being read"):
        artifact.tensor(f"{MODULE}.weight_scale")


def test_hashing_that_began_before_is_used(artifact: Artifact) -> None:
    require_intact(artifact.folder, Hashing(artifact.folder, num_threads=2))
    data = bytearray((artifact.folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (artifact.folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ArtifactError, match="differs from its digest in the manifest; make the artifact again"):
        require_intact(artifact.folder, Hashing(artifact.folder, num_threads=2))
