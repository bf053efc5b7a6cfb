from pathlib import Path

import pytest
import torch
from architectures import MakeModel, random_model
from safetensors.torch import load_file, save_file

from quantpipe.errors import RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.quantize.model.gpt2 import as_opt, conversion_note


@torch.no_grad()
@pytest.mark.parametrize("tie", [True, False])
def test_the_opt_form_computes_what_gpt2_does_in_float64(tiny_model: MakeModel, tie: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    base = as_opt(Artifact.open(tiny_model("gpt2", tie_word_embeddings=tie)))
    opt = AutoModelForCausalLM.from_config(AutoConfig.for_model(**base.config)).eval()
    missing, unexpected = opt.load_state_dict({name: base.tensor(name) for name in base.stored}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if tie else [], [])
    opt.tie_weights()
    token_ids = torch.arange(3, 67).reshape(2, 32)
    expected = random_model("gpt2", tie_word_embeddings=tie).double()(input_ids=token_ids).logits
    # the query is scaled before the product here and after it there
    torch.testing.assert_close(opt.double()(input_ids=token_ids).logits, expected, rtol=1e-12, atol=1e-12)


def test_every_tensor_reads_in_the_shape_it_is_said_to_have(tiny_model: MakeModel) -> None:
    base = as_opt(Artifact.open(tiny_model("gpt2")))
    for name, stored in base.stored.items():
        assert base.tensor(name).shape == stored.spec.shape
        assert base.tensor(name).is_contiguous()


def test_other_families_are_left_as_they_are(tiny_model: MakeModel) -> None:
    base = Artifact.open(tiny_model("opt"))
    assert as_opt(base) is base
    assert conversion_note(base) is None


def test_the_user_is_told_that_the_artifact_is_an_opt(tiny_model: MakeModel) -> None:
    assert "written as OPT" in (conversion_note(as_opt(Artifact.open(tiny_model("gpt2")))) or "")


@pytest.mark.parametrize(("field", "value"), [("scale_attn_by_inverse_layer_idx", True), ("layer_norm_epsilon", 1e-6)])
def test_settings_that_opt_does_not_have_are_refused(tiny_model: MakeModel, field: str, value: object) -> None:
    with pytest.raises(RecipeError, match=f"{field} {value} has no counterpart in OPT"):
        as_opt(Artifact.open(tiny_model("gpt2", **{field: value})))


def test_checkpoints_without_prefix_and_with_masks_are_read_and_unknown_tensors_refused(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    folder = tiny_model("gpt2")
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "model.safetensors")
    assert as_opt(Artifact.open(tmp_path)).stored.keys() == as_opt(Artifact.open(folder)).stored.keys()
    save_file(tensors | {"h.0.crossattention.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(RecipeError, match=r"tensor h\.0\.crossattention\.weight is none of GPT-2's"):
        as_opt(Artifact.open(tmp_path))
