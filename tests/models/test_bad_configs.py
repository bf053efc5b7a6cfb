"""No value of a config.json ends in a traceback: what cannot be is refused with the file and the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from random_llama import CONFIG, write_random_llama

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import ArtifactError, RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.models import FAMILIES, describe
from quantpipe.quantize.model.loading import check_supported

# What a family has that the others have not, so that each of its fields is read.
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "attention_bias": False},
    "gemma3_text": {
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 2,
    },
    "phi3": {"original_max_position_embeddings": 256, "partial_rotary_factor": 0.5},
}
KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("rope_parameters", "sliding_window", "max_window_layers", "layer_types", "partial_rotary_factor"),
    *("query_pre_attn_scalar", "rope_local_base_freq", "original_max_position_embeddings", "bos_token_id"),
    *("eos_token_id", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "model_type"),
    *("architectures", "quantization_config", "use_sliding_window", "sliding_window_pattern"),
)
BAD = (0, -1, 2.5, "4", "", True, None, [], [0], ["x"], {}, {"x": 1}, 10**9, 10**30, float("nan"), float("inf"))
# Positive whole numbers that every family has to hold.
REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": ["yarn"]},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
    {"rope_type": "yarn", "factor": 0},
    {"rope_type": "dynamic", "factor": "2"},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
    {"rope_type": "linear", "factor": 0},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": 5},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1, "short_factor": [1.0] * 8}
    | {"long_factor": [1.0] * 8},
    {"rope_type": "default", "rope_theta": "x"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    made = tmp_path_factory.mktemp("bad") / "model"
    made.mkdir()
    write_random_llama(made, Tokenizer.open(tiny_llama))
    return made


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def refusal(folder: Path) -> str | None:
    try:
        describe(Artifact.open(folder))
    except ArtifactError as error:
        return str(error)
    return None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", KEYS)
def test_no_value_breaks_the_description(folder: Path, family: str, key: str) -> None:
    plain = CONFIG | {"model_type": family} | OWN[family]
    write(folder, plain)
    assert refusal(folder) is None
    for value in BAD:
        write(folder, plain | {key: value})
        text = refusal(folder)
        if text is not None:
            assert text.startswith(f"{folder}/config.json: "), (value, text)
            assert "\n" not in text and len(text) < 400
    write(folder, {name: value for name, value in plain.items() if name != key})
    text = refusal(folder)
    assert text is None or key in text
    if key in REQUIRED:
        for value in (0, -1, 2.5, "4", True, None, [], {}, 10**30):
            write(folder, plain | {key: value})
            assert (refusal(folder) or "").startswith(f"{folder}/config.json: {key}: "), value


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_a_rope_that_cannot_be_computed_is_refused(folder: Path, rope: dict[str, Any]) -> None:
    write(folder, CONFIG | {"rope_parameters": rope})
    assert (refusal(folder) or "").startswith(f"{folder}/config.json: ")


def test_heads_that_do_not_divide_the_model_are_named(folder: Path) -> None:
    write(folder, CONFIG | {"num_attention_heads": 5, "num_key_value_heads": 5})
    assert "hidden_size 64 is not a multiple of num_attention_heads 5, and there is no head_dim" in str(refusal(folder))


@pytest.mark.parametrize("key", KEYS)
def test_no_value_breaks_the_quantizer(folder: Path, key: str) -> None:
    for value in BAD:
        write(folder, CONFIG | {key: value})
        try:
            check_supported(folder)
        except (ArtifactError, RecipeError) as error:
            text = str(error)
            assert text.startswith(str(folder)) and "\n" not in text, (value, text)
            assert key in text or "transformers cannot load this model" in text, (value, text)


def test_heads_that_are_none_are_named_before_anything_divides_by_them(folder: Path) -> None:
    write(folder, CONFIG | {"num_attention_heads": 0})
    with pytest.raises(ArtifactError) as caught:
        check_supported(folder)
    assert str(caught.value).startswith(f"{folder}/config.json: num_attention_heads: 0 is not a positive whole number")
