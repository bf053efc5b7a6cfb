"""What a config.json says becomes the right description; what this runtime cannot do is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.errors import ArtifactError, UnservedError
from quantpipe.formats.artifact import Artifact
from quantpipe.models import FAMILIES, describe
from quantpipe.models.description import DecoderDescription

MakeFolder = Callable[..., Path]


def description_of(folder: Path) -> DecoderDescription:
    return describe(Artifact.open(folder))


def test_shapes_follow_the_config(make_folder: MakeFolder) -> None:
    described = description_of(make_folder())
    assert (described.vocab_size, described.hidden_size, described.num_layers) == (96, 64, 2)
    assert (described.num_heads, described.num_kv_heads, described.head_dim) == (4, 2, 16)
    assert described.max_position_embeddings == 256
    attention = described.layers[1].attention
    assert (attention.query.name, attention.query.out_features) == ("model.layers.1.self_attn.q_proj", 64)
    assert (attention.key.out_features, attention.key.in_features) == (32, 64)
    assert not any(linear.has_bias for linear in described.linears())


def test_head_dim_may_differ_from_hidden_size_over_heads(make_folder: MakeFolder) -> None:
    attention = description_of(make_folder(head_dim=32)).layers[0].attention
    assert (attention.query.out_features, attention.output.in_features, attention.head_dim) == (128, 128, 32)


def test_biases_are_described_where_the_config_has_them(make_folder: MakeFolder) -> None:
    described = description_of(make_folder(attention_bias=True))
    layer = described.layers[0]
    assert layer.attention.query.has_bias and layer.attention.output.has_bias and not layer.mlp.up.has_bias


def test_stop_tokens_join_both_configs(make_folder: MakeFolder) -> None:
    folder = make_folder({"eos_token_id": 2, "bos_token_id": 1})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}), encoding="utf-8")
    described = description_of(folder)
    assert described.eos_token_ids == (2, 7)
    assert described.bos_token_id == 1


def test_damaged_generation_config_is_refused(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "generation_config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"generation_config\.json: not readable"):
        description_of(folder)


def test_unknown_family_is_named_with_the_known_ones(make_folder: MakeFolder) -> None:
    message = r"model_type 'lama' is not served by the bundled runtime \(it serves .*, llama, mistral, .*\); give a"
    with pytest.raises(UnservedError, match=message):
        description_of(make_folder({"model_type": "lama"}))
    assert {"llama", "mistral"} <= FAMILIES.keys()


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"sliding_window": 128}, "sliding_window 128 is not supported"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "unknown layer type 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers; num_hidden_layers is 2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention, yet"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "unknown rope_type 'spiral'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'linear' lacks a legal 'factor'"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 6]}}, "unknown rope field 'mrope_section'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a number above 0"),
        ({"head_dim": -16}, "head_dim: -16 is not a positive whole number"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: 'two' is not a positive whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_cannot_be_executed_is_refused_by_name(
    make_folder: MakeFolder, edits: dict[str, Any], message: str
) -> None:
    folder = make_folder(edits)
    with pytest.raises(ArtifactError, match=message) as caught:
        description_of(folder)
    assert str(folder) in str(caught.value)


def test_a_window_that_no_context_outgrows_is_no_obstacle(make_folder: MakeFolder) -> None:
    assert description_of(make_folder({"sliding_window": 256})).num_layers == 2
