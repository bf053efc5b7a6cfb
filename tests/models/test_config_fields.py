"""Rope frequencies equal those of transformers, in both spellings of the config."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import rope_spec

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
}


def artifact_with(config: dict[str, Any]) -> Artifact:
    return Artifact(Path("model"), config, None, {})


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_equal_those_of_transformers(kind: str) -> None:
    parameters = {**KINDS[kind], "rope_theta": 5000.0}
    oracle = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters))
    found = torch.tensor(rope_spec(artifact_with({"rope_parameters": parameters}), 64).inverse_frequencies)
    assert torch.equal(found, oracle.inv_freq)


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", KINDS)
def test_older_spelling_means_the_same(kind: str, type_key: str) -> None:
    scaling = {type_key if key == "rope_type" else key: value for key, value in KINDS[kind].items()}
    old = rope_spec(artifact_with({"rope_theta": 5000.0, "rope_scaling": scaling}), 64)
    assert old == rope_spec(artifact_with({"rope_parameters": {**KINDS[kind], "rope_theta": 5000.0}}), 64)


def test_config_without_rope_fields_takes_the_usual_base() -> None:
    assert rope_spec(artifact_with({}), 8).inverse_frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001), rel=1e-6)


def test_rope_depends_on_theta() -> None:
    first, second = (rope_spec(artifact_with({"rope_theta": theta}), 8) for theta in (1e4, 5e5))
    assert first != second
