"""Phi-3's fused tensors are cut into linears by rows, and its older names of longrope are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.artifact_writer import QuantWeight, quantization_config, write_artifact
from quantpipe.formats.layout import encode, minmax_scale
from quantpipe.formats.scheme import weight_only
from quantpipe.models import describe
from quantpipe.models.weights import check_tensors, load_linear

MakeModel = Callable[..., Path]
QKV = "model.layers.1.self_attn.qkv_proj"


def edited(folder: Path, copy: Path, **edits: Any) -> Artifact:
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | edits
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Artifact.open(copy)


def test_query_key_and_value_are_rows_of_one_tensor(tiny_model: MakeModel) -> None:
    artifact = Artifact.open(tiny_model("phi3"))
    described = describe(artifact)
    check_tensors(described, artifact)
    attention, mlp = described.layers[1].attention, described.layers[1].mlp
    assert [spec.rows for spec in (attention.query, attention.key, attention.value)] == [(0, 64), (64, 96), (96, 128)]
    assert [spec.rows for spec in (mlp.gate, mlp.up, mlp.down)] == [(0, 128), (128, 256), None]
    assert {spec.name for spec in (attention.query, attention.key, attention.value)} == {QKV}
    key_NK = load_linear(artifact, attention.key).weight_NK
    assert torch.equal(key_NK, artifact.tensor(f"{QKV}.weight")[64:96])
    assert key_NK.untyped_storage().nbytes() == key_NK.nbytes


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_zero_points_are_cut_with_their_rows(tiny_model: MakeModel, tmp_path: Path, bits: int) -> None:
    """They are packed along the rows; with 8 query heads of 10 no cut but the first falls on a word."""
    base = Artifact.open(tiny_model("phi3", hidden_size=80, num_attention_heads=8, num_key_value_heads=1))
    scheme = weight_only(bits, 16, symmetric=False)
    weight_NK = base.tensor(f"{QKV}.weight")
    scale_NG, zero_NG = minmax_scale(weight_NK, scheme, torch.float32)
    weight = QuantWeight(encode(weight_NK, scale_NG, scheme, zero_NG), scale_NG, scheme, zero_NG)
    config = quantization_config({QKV: scheme}, ["lm_head"])
    artifact = write_artifact(tmp_path / "quantized", base, {QKV: weight}, config, {})
    described = describe(artifact)
    check_tensors(described, artifact)
    attention = described.layers[1].attention
    specs = (attention.query, attention.key, attention.value)
    assert [spec.rows for spec in specs] == [(0, 80), (80, 90), (90, 100)]
    parts = [load_linear(artifact, spec).dequantized() for spec in specs]
    assert torch.equal(torch.cat(parts), weight.dequantized())


def test_a_fused_tensor_of_another_height_is_named(tiny_model: MakeModel, tmp_path: Path) -> None:
    artifact = edited(tiny_model("phi3"), tmp_path / "copy", num_key_value_heads=1)
    name = r"model\.layers\.0\.self_attn\.qkv_proj\.weight"
    with pytest.raises(ArtifactError, match=name + r" has shape \[128, 64\]; config\.json asks for \[96, 64\]"):
        check_tensors(describe(artifact), artifact)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_every_name_of_longrope_limits_the_context_and_says_so(
    tiny_model: MakeModel, tmp_path: Path, name: str
) -> None:
    rope = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    edits = {"rope_parameters": None, "rope_scaling": rope, "original_max_position_embeddings": 64}
    described = describe(edited(tiny_model("phi3"), tmp_path / "copy", **edits))
    assert described.max_position_embeddings == 64
    assert "contexts end at 64 of 256 positions" in described.notes[0]
