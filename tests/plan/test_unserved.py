"""Models that the runtime does not serve, from the fields of their configs."""

from pathlib import Path
from typing import Any

import pytest
from planned import LLAMA_8B, MIXTRAL, shape_in

from quantpipe.errors import ArtifactError


def test_mixtral_has_47_billion_weights_of_which_a_token_reads_13(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, MIXTRAL)
    assert not shape.is_served
    assert round(shape.num_weights / 1e9, 1) == 46.7
    used = sum(own.num_used_weights for own in shape.linears) + 2 * shape.lm_head.num_weights
    assert round(used / 1e9, 1) == 12.9
    assert any("'mixtral' is not served" in note for note in shape.notes)
    assert any("experts" in note for note in shape.notes)


def test_qwen_moe_counts_small_experts_and_the_shared_one(tmp_path: Path) -> None:
    fields = {"model_type": "qwen2_moe", "num_experts": 60, "num_experts_per_tok": 4}
    sizes = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "intermediate_size": 5632}
    shape = shape_in(tmp_path, LLAMA_8B | fields | sizes)
    first = {own.name: own for own in shape.linears if ".layers.0.mlp." in own.name}
    assert first["model.layers.0.mlp.experts.up_proj"].out_features == 1408
    assert first["model.layers.0.mlp.experts.up_proj"].num_copies == 60
    assert first["model.layers.0.mlp.shared_expert.down_proj"].in_features == 5632
    assert first["model.layers.0.mlp.gate"].out_features == 60


def test_gpt2_is_read_by_its_own_names(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}
    shape = shape_in(tmp_path, config | {"vocab_size": 50257, "tie_word_embeddings": True})
    assert sum(own.num_weights for own in shape.linears) == 12 * 12 * 768**2
    assert shape.max_positions == 1024 and shape.attention[0].head_dim == 64


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    config = {name: value for name, value in MIXTRAL.items() if name != key}
    with pytest.raises(ArtifactError, match=rf"config\.json: {key}: missing") as error:
        shape_in(tmp_path, config)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("value", [-1, 0, "32", 1.5, True])
def test_a_field_that_is_no_count_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ArtifactError, match=r"config\.json: num_hidden_layers: .* is not a positive whole number"):
        shape_in(tmp_path, MIXTRAL | {"num_hidden_layers": value})


def test_other_kinds_of_cache_are_refused_instead_of_miscounted(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"kv_lora_rank: .* cannot be planned"):
        shape_in(tmp_path, LLAMA_8B | {"model_type": "deepseek_v3", "kv_lora_rank": 512})


def test_a_window_that_cannot_be_placed_is_said(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, MIXTRAL | {"sliding_window": 4096})
    assert any("sliding_window is not counted" in note for note in shape.notes)


def test_more_heads_than_the_hidden_size_has_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="num_attention_heads: 8192 exceeds hidden_size 4096"):
        shape_in(tmp_path, MIXTRAL | {"num_attention_heads": 8192})
