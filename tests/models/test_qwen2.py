"""Qwen2 is Llama's form with biases on queries, keys and values, whatever config.json says of attention_bias."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models import describe
from quantpipe.models.description import DecoderDescription

MakeModel = Callable[..., Path]


def description_with(folder: Path, copy: Path, **edits: Any) -> DecoderDescription:
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | edits
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return describe(Artifact.open(copy))


def test_only_queries_keys_and_values_have_biases(tiny_model: MakeModel) -> None:
    described = describe(Artifact.open(tiny_model("qwen2")))
    assert described.family == "qwen2"
    biased = {linear.name.split(".")[-1] for linear in described.linears() if linear.has_bias}
    assert biased == {"q_proj", "k_proj", "v_proj"}


@pytest.mark.parametrize(
    "edits",
    [
        {"use_sliding_window": False, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_that_no_layer_has_is_no_obstacle(tiny_model: MakeModel, tmp_path: Path, edits: Any) -> None:
    described = description_with(tiny_model("qwen2"), tmp_path / "copy", **edits)
    assert [layer.attention.window for layer in described.layers] == [None, None]


@pytest.mark.parametrize(
    "edits", [{"max_window_layers": 1, "layer_types": None}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_only_the_layers_that_have_a_window_get_it(tiny_model: MakeModel, tmp_path: Path, edits: Any) -> None:
    described = description_with(
        tiny_model("qwen2"), tmp_path / "copy", use_sliding_window=True, sliding_window=8, **edits
    )
    assert [layer.attention.window for layer in described.layers] == [None, 8]


def test_a_sliding_layer_without_a_window_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    edits: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}
    with pytest.raises(ArtifactError, match="layer_types has sliding_attention, yet sliding_window is null"):
        description_with(tiny_model("qwen2"), tmp_path / "copy", use_sliding_window=True, **edits)
