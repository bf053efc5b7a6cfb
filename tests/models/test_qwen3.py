"""Qwen3: Qwen2's windows, no biases unless config.json says so, and norms of queries and keys per head."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.formats.artifact import Artifact
from quantpipe.models import describe

MakeModel = Callable[..., Path]


def test_heads_are_normed_and_nothing_has_a_bias(tiny_model: MakeModel) -> None:
    described = describe(Artifact.open(tiny_model("qwen3")))
    attention = described.layers[1].attention
    assert attention.query_norm is not None and attention.key_norm is not None
    assert (attention.query_norm.name, attention.query_norm.size) == ("model.layers.1.self_attn.q_norm", 16)
    assert (attention.key_norm.size, attention.key_norm.offset) == (16, 0.0)
    assert not any(linear.has_bias for linear in described.linears())


@pytest.mark.parametrize(
    ("edits", "windows", "head_dim"),
    [
        ({"head_dim": None}, [None, None], 128),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None}, [None, 8], 16),
    ],
)
def test_fields_left_out_mean_what_transformers_assumes(
    tiny_model: MakeModel, tmp_path: Path, edits: dict[str, Any], windows: list[int | None], head_dim: int
) -> None:
    folder = tiny_model("qwen3")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | edits
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    described = describe(Artifact.open(tmp_path))
    assert [layer.attention.window for layer in described.layers] == windows
    assert described.head_dim == head_dim
