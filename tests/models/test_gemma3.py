"""Gemma 3: which layers slide, which rope each has, in both spellings, and what its norms and embeddings add."""

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
OLDER: dict[str, Any] = {"layer_types": None, "rope_parameters": None}


def description_with(folder: Path, copy: Path, **edits: Any) -> DecoderDescription:
    """``edits`` replace fields of config.json; None removes one."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | edits
    kept = {key: value for key, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return describe(Artifact.open(copy))


def test_layers_are_described_as_they_are_stored(tiny_model: MakeModel) -> None:
    described = describe(Artifact.open(tiny_model("gemma3")))
    sliding, full = described.layers
    assert (sliding.attention.window, full.attention.window) == (8, None)
    assert sliding.attention.rope != full.attention.rope
    assert (described.embedding_scale, full.attention.softmax_scale) == (8.0, 256**-0.5)
    assert {norm.offset for norm in described.norms()} == {1.0}
    assert [norm.name.split(".")[-1] for norm in described.norms()[:6]] == [
        "input_layernorm",
        "q_norm",
        "k_norm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ]
    assert full.mlp.activation == "gelu_tanh"


@pytest.mark.parametrize(("period", "windows"), [(2, [8, None]), (1, [None, None]), (None, [8, 8])])
def test_older_configs_tell_full_layers_by_a_period(
    tiny_model: MakeModel, tmp_path: Path, period: int | None, windows: list[int | None]
) -> None:
    described = description_with(tiny_model("gemma3"), tmp_path / "copy", **OLDER, sliding_window_pattern=period)
    assert [layer.attention.window for layer in described.layers] == windows


def test_older_spelling_of_both_ropes_means_the_same(tiny_model: MakeModel, tmp_path: Path) -> None:
    newer = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    older = {"rope_theta": 1e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    folder = tiny_model("gemma3")
    first = description_with(folder, tmp_path / "newer", rope_parameters=newer)
    second = description_with(folder, tmp_path / "older", rope_parameters=None, **older)
    assert [layer.attention.rope for layer in first.layers] == [layer.attention.rope for layer in second.layers]


def test_fields_left_out_mean_what_transformers_assumes(tiny_model: MakeModel, tmp_path: Path) -> None:
    from transformers import Gemma3TextConfig

    left_out = ("query_pre_attn_scalar", "hidden_activation", "tie_word_embeddings", "rope_parameters", "head_dim")
    described = description_with(tiny_model("gemma3"), tmp_path / "copy", **dict.fromkeys(left_out))
    config, (sliding, full) = Gemma3TextConfig(), described.layers
    assert full.attention.softmax_scale == config.query_pre_attn_scalar**-0.5
    assert full.attention.head_dim == config.head_dim
    assert described.is_head_tied == config.tie_word_embeddings
    thetas = [config.rope_parameters[kind]["rope_theta"] for kind in ("sliding_attention", "full_attention")]
    for layer, theta in zip((sliding, full), thetas, strict=True):
        assert layer.attention.rope.inverse_frequencies[1] == pytest.approx(theta ** (-2 / 256))


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0 is not supported"),
        ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping 50\.0 is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0 is not a number above 0"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(
    tiny_model: MakeModel, tmp_path: Path, edits: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        description_with(tiny_model("gemma3"), tmp_path / "copy", **edits)
