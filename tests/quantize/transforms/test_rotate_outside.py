from pathlib import Path

import pytest
import torch
from architectures import HIDDEN, MakeModel, save_model

from quantpipe.errors import RecipeError
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.transforms.hadamard import make_rotation
from quantpipe.quantize.transforms.rotate_outside import prove_outside, rotate_outside, users_outside

# Blocks of every family here give out hidden states alone.
KIND = torch.empty(0)


def opened(folder: Path) -> StreamedModel:
    return StreamedModel.open(folder)


@pytest.mark.parametrize(
    ("name", "writers", "norm", "head"),
    [
        ("llama", ("model.embed_tokens",), "model.norm", "lm_head"),
        ("gemma3", ("model.embed_tokens",), "model.norm", "lm_head"),
        ("gpt_neox", ("gpt_neox.embed_in",), "gpt_neox.final_layer_norm", "lm_head"),
        (
            "opt",
            ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
            "model.decoder.final_layer_norm",
            "lm_head",
        ),
    ],
)
def test_embeddings_final_norm_and_head_are_found_by_what_they_do(
    tiny_model: MakeModel, name: str, writers: tuple[str, ...], norm: str, head: str
) -> None:
    model = opened(tiny_model(name))
    users = users_outside(model, KIND)
    assert users.writers == writers
    (group,) = users.readers
    assert group.norm is not None
    assert (group.norm.name, group.names) == (norm, (head,))
    turn = make_rotation(HIDDEN, "hadamard", torch.Generator().manual_seed(0), users.subtracts_mean)
    assert prove_outside(model, users, turn, KIND) < 1e-6  # some norms compute in float32


def test_proof_leaves_the_model_as_it_is(tiny_model: MakeModel) -> None:
    model = opened(tiny_model("qwen2"))
    before = {name: model.module.get_parameter(name).clone() for name in model.outside()}
    users = users_outside(model, KIND)
    prove_outside(model, users, make_rotation(HIDDEN, "hadamard", torch.Generator()), KIND)
    for name, kept in before.items():
        assert torch.equal(model.module.get_parameter(name), kept)
        assert model.module.get_parameter(name).dtype == torch.float32


def test_rotation_that_moves_the_mean_is_refused_where_a_norm_subtracts_it(tiny_model: MakeModel) -> None:
    model = opened(tiny_model("opt"))
    users = users_outside(model, KIND)
    with pytest.raises(RecipeError, match="with lm_head rotated the logits change"):
        prove_outside(model, users, make_rotation(HIDDEN, "hadamard", torch.Generator()), KIND)


def test_tied_head_is_untied_and_an_untied_one_keeps_its_parameter(tiny_model: MakeModel) -> None:
    turn = make_rotation(HIDDEN, "hadamard", torch.Generator())
    for name, is_tied in (("qwen2", True), ("llama", False)):
        model = opened(tiny_model(name))
        head = model.module.get_parameter("lm_head.weight")
        assert (head is model.module.get_parameter("model.embed_tokens.weight")) == is_tied
        rotate_outside(model.module, users_outside(model, KIND), turn)
        assert model.module.get_parameter("lm_head.weight") is not model.module.get_parameter(
            "model.embed_tokens.weight"
        )
        assert (model.module.get_parameter("lm_head.weight") is head) != is_tied


def test_projections_between_narrow_embeddings_and_the_stream_are_rotated_instead(tmp_path: Path) -> None:
    model = opened(save_model(tmp_path, "opt", word_embed_proj_dim=32, tie_word_embeddings=True))
    users = users_outside(model, KIND)
    assert users.writers == ("model.decoder.embed_positions", "model.decoder.project_in")
    assert [group.names for group in users.readers] == [("model.decoder.project_out",)]
    turn = make_rotation(HIDDEN, "hadamard", torch.Generator(), fixes_ones=True)
    assert prove_outside(model, users, turn, KIND) < 1e-6
    rotate_outside(model.module, users, turn)
    tied = model.module.get_parameter("lm_head.weight")
    assert tied is model.module.get_parameter("model.decoder.embed_tokens.weight")


def test_norm_between_embeddings_and_stream_is_refused(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    with torch.random.fork_rng():
        BloomForCausalLM(BloomConfig(hidden_size=HIDDEN, n_layer=2, n_head=4, vocab_size=128)).save_pretrained(tmp_path)
    model = StreamedModel.open(tmp_path, attention="eager")
    with pytest.raises(RecipeError, match=r"what transformer\.word_embeddings_layernorm gives out"):
        users_outside(model, (KIND, None))
