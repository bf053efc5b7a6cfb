"""Models of kinds that are not quantized say in one line what they are; none is called incomplete."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from architectures import MakeModel

from quantpipe.errors import ArtifactError
from quantpipe.quantize.model.loading import StreamedModel, check_supported

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
BERT = {**SMALL, "num_attention_heads": 2, "intermediate_size": 64}
# The class of a model, its config, and what is said of it.
OTHERS: dict[str, tuple[str, Any, str]] = {
    "encoder": ("BertForMaskedLM", transformers.BertConfig(**BERT), "holds a BertForMaskedLM; supported are decoder"),
    "encoder without head": ("BertModel", transformers.BertConfig(**BERT), "holds a BertModel; supported are decoder"),
    "no attention": (
        "MambaForCausalLM",
        transformers.MambaConfig(**SMALL, state_size=4),
        "holds a MambaForCausalLM, which transformers does not run with scaled_dot_product_attention; supported are",
    ),
    "encoder and decoder": (
        "T5ForConditionalGeneration",
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
        "holds a T5ForConditionalGeneration; supported are decoder",
    ),
}


def saved(folder: Path, class_name: str, config: Any, **edits: Any) -> Path:
    """A model of random weights, with fields of its config.json replaced; None removes one."""
    getattr(transformers, class_name)(config).save_pretrained(folder)
    return edited(folder, **edits)


def edited(folder: Path, **edits: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | edits
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def refusal(folder: Path) -> str:
    """What opening the folder says, which is what is said before the weights are looked at, without the file's name."""
    with pytest.raises(ArtifactError) as caught:
        StreamedModel.open(folder)
    with pytest.raises(ArtifactError) as early:
        check_supported(folder)
    assert str(caught.value) == str(early.value)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}/config.json: ")


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_model_are_refused_as_what_they_are(tmp_path: Path, kind: str) -> None:
    class_name, config, expected = OTHERS[kind]
    assert refusal(saved(tmp_path / "model", class_name, config)).startswith(expected)


def test_an_encoder_whose_config_names_no_class_is_known_by_its_attention(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "BertForMaskedLM", transformers.BertConfig(**BERT), architectures=None)
    assert refusal(folder).startswith("holds a BertLMHeadModel that attends in both directions; supported are")


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ({"model_type": "lama"}, f"is unknown to transformers {transformers.__version__}; did you mean 'llama'?"),
        ({"model_type": "zzz"}, f"is unknown to transformers {transformers.__version__}; update transformers, or give"),
        ({"model_type": "vit", "architectures": None}, "'vit' has no causal language model; supported are"),
        ({"model_type": "bart", "architectures": None}, "'bart' has an encoder beside the decoder; supported are"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}, "set model.trust_remote_code: true to run it"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "holds a LlamaForSequenceClassification; supported are",
        ),
    ],
)
def test_what_config_json_says_decides_before_any_weight_is_read(
    tiny_model: MakeModel, tmp_path: Path, edits: dict[str, Any], expected: str
) -> None:
    config = json.loads((tiny_model("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(tiny_model("llama") / "model.safetensors")
    assert expected in refusal(edited(tmp_path, **edits))


def test_a_class_that_transformers_does_not_know_says_nothing(tiny_model: MakeModel, tmp_path: Path) -> None:
    """Old folders spell it LLaMAForCausalLM."""
    (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(tiny_model("llama") / "model.safetensors")
    StreamedModel.open(edited(tmp_path, architectures=["LLaMAForCausalLM"]))


def test_a_size_that_breaks_the_code_of_a_family_is_one_line(tiny_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(tiny_model("llama") / "model.safetensors")
    with pytest.raises(ArtifactError, match="transformers cannot load this model: ") as caught:
        StreamedModel.open(edited(tmp_path, num_attention_heads=[4, 4]))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    with pytest.raises(ArtifactError, match=r"config\.json: num_attention_heads: 0 is not a positive whole number"):
        StreamedModel.open(edited(tmp_path, num_attention_heads=0))
