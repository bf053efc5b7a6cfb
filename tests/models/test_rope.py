"""Rope frequencies and scales equal those of transformers, in both spellings of the config."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models.description import RopeSpec
from quantpipe.models.rope import ROPE_KINDS, rope_spec
from quantpipe.models.rope_fields import rope_parameters

HEAD_DIM = 64
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.3},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3 whose original context is the model's": {"rope_type": "llama3", **LLAMA3}
    | {"original_max_position_embeddings": 2048},
    "yarn": YARN,
    "yarn with its scale": {**YARN, "attention_factor": 1.25},
    "yarn of another range": {**YARN, "beta_fast": 24, "beta_slow": 2, "truncate": False},
    "yarn with weights": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn that shrinks nothing": {**YARN, "factor": 1.0},
}
PAIRS = HEAD_DIM // 2
SHORT, LONG = [1.0 + 0.01 * pair for pair in range(PAIRS)], [1.0 + 0.5 * pair for pair in range(PAIRS)]
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def artifact_with(**config: Any) -> Artifact:
    return Artifact(Path("model"), {"max_position_embeddings": 2048, **config}, None, {})


def spec_of(**config: Any) -> RopeSpec:
    artifact = artifact_with(**config)
    return rope_spec(artifact, rope_parameters(artifact.config), HEAD_DIM)


def assert_equals_oracle(found: RopeSpec, oracle: Any) -> None:
    assert torch.equal(torch.tensor(found.inverse_frequencies), oracle.inv_freq)
    assert found.attention_scale == oracle.attention_scaling


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_scale_equal_those_of_transformers(kind: str) -> None:
    parameters = {**KINDS[kind], "rope_theta": 5000.0}
    oracle = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(parameters))
    assert_equals_oracle(spec_of(rope_parameters=parameters), LlamaRotaryEmbedding(oracle))


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", KINDS)
def test_older_spelling_means_the_same(kind: str, type_key: str) -> None:
    scaling = {type_key if key == "rope_type" else key: value for key, value in KINDS[kind].items()}
    old = spec_of(rope_theta=5000.0, rope_scaling=scaling)
    assert old == spec_of(rope_parameters={**KINDS[kind], "rope_theta": 5000.0})


def test_yarn_without_a_factor_takes_what_the_two_lengths_say() -> None:
    without = {key: value for key, value in YARN.items() if key != "factor"}
    assert spec_of(rope_parameters=without) == spec_of(rope_parameters={**YARN, "factor": 2048 / 64})


@pytest.mark.parametrize("attention_factor", [None, 1.1])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_equals_that_of_transformers_within_its_original_context(
    partial: float, attention_factor: float | None
) -> None:
    num_pairs = int(PAIRS * partial)
    factors = {"short_factor": SHORT[:num_pairs], "long_factor": LONG[:num_pairs]}
    scaling = {**LONGROPE, **factors, "partial_rotary_factor": partial, "rope_theta": 1e4}
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor
    config: dict[str, Any] = {"max_position_embeddings": 2048, "original_max_position_embeddings": 128}
    oracle = Phi3RotaryEmbedding(
        Phi3Config(hidden_size=4 * HEAD_DIM, num_attention_heads=4, rope_parameters=dict(scaling), **config)
    )
    found = rope_spec(artifact_with(**config), scaling, HEAD_DIM, may_be_partial=True)
    assert_equals_oracle(found, oracle)
    assert found.max_positions == 128
    oracle(torch.zeros(1), torch.arange(128)[None])
    assert_equals_oracle(found, oracle)
    oracle(torch.zeros(1), torch.arange(129)[None])
    assert not torch.equal(torch.tensor(found.inverse_frequencies), oracle.inv_freq)


def test_longrope_whose_two_sets_are_one_has_no_limit() -> None:
    config = {"original_max_position_embeddings": 128}
    assert spec_of(rope_parameters={**LONGROPE, "long_factor": SHORT}, **config).max_positions is None


def test_dynamic_rope_holds_up_to_the_models_own_limit() -> None:
    parameters = {"rope_type": "dynamic", "factor": 3.3, "rope_theta": 1e4}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(parameters))
    oracle, found = LlamaRotaryEmbedding(config), spec_of(rope_parameters=parameters)
    assert found.max_positions == config.max_position_embeddings
    oracle(torch.zeros(1), torch.arange(2048)[None])
    assert torch.equal(torch.tensor(found.inverse_frequencies), oracle.inv_freq)
    oracle(torch.zeros(1), torch.arange(2049)[None])
    assert not torch.equal(torch.tensor(found.inverse_frequencies), oracle.inv_freq)


def test_config_without_rope_fields_takes_the_usual_base() -> None:
    found = rope_spec(artifact_with(), {}, 8)
    assert found.inverse_frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001), rel=1e-6)


def test_rope_depends_on_theta() -> None:
    first, second = (spec_of(rope_theta=theta) for theta in (1e4, 5e5))
    assert first != second


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "yran"}, "unknown rope_type 'yran'; did you mean 'yarn'"),
        ({"rope_type": "proportional"}, "unknown rope_type 'proportional'"),
        ({"rope_type": "yarn", "beta_fats": 3}, "unknown rope field 'beta_fats'; did you mean 'beta_fast'"),
        ({"rope_type": "yarn", "factor": "4"}, "rope_type 'yarn' lacks a legal 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_type 'llama3' lacks a legal 'low_freq_factor'"),
        ({"rope_type": "linear", "factor": 0}, "rope_type 'linear' lacks a legal 'factor'"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "'llama3' lacks a legal 'high_freq_factor'"),
        ({"rope_type": "yarn", "mscale": "a", "mscale_all_dim": 1}, "rope_type 'yarn' lacks a legal"),
        ({"rope_theta": -1.0}, r"rope_theta: -1\.0 is not a number above 0"),
        ({**YARN, "original_max_position_embeddings": "64"}, "original_max_position_embeddings: '64' is not a number"),
        ({**LONGROPE, "short_factor": SHORT[:-1]}, "rope_type 'longrope' lacks a legal 'short_factor'"),
        (
            {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
            "rope_type 'dynamic' lacks a legal 'original_max_position_embeddings'",
        ),
        ({"full_attention": {"rope_type": "default"}}, "unknown rope field 'full_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ],
)
def test_what_cannot_be_turned_is_refused_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        spec_of(rope_parameters=parameters)


@pytest.mark.parametrize("partial", [0.0, 1.5, 3 / HEAD_DIM, "half"])
def test_a_part_of_a_head_that_cannot_be_turned_is_refused(partial: object) -> None:
    with pytest.raises(ArtifactError, match="dimensions; an even number of them is needed"):
        rope_spec(artifact_with(), {"partial_rotary_factor": partial}, HEAD_DIM, may_be_partial=True)


def test_every_kind_is_compared_with_transformers() -> None:
    assert {kind["rope_type"] for kind in (*KINDS.values(), LONGROPE)} == ROPE_KINDS.keys()
