from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from quantpipe.formats.scheme import w8a8, weight_only
from quantpipe.quantize.loop.outside import outside_changes, solve_outside
from quantpipe.quantize.model.loading import StreamedModel

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@pytest.fixture
def model(random_llama: Callable[..., Path]) -> StreamedModel:
    return StreamedModel.open(random_llama(torch.bfloat16, tie_word_embeddings=True))


def untie(model: StreamedModel) -> None:
    head = nn.Parameter(model.module.get_parameter(HEAD).clone(), requires_grad=False)
    model.module.get_submodule("lm_head").register_parameter("weight", head)


def test_an_untouched_model_has_no_changes(model: StreamedModel) -> None:
    changes = outside_changes(model)
    assert (dict(changes.tensors), dict(changes.added), dict(changes.config_updates)) == ({}, {}, {})


def test_changed_parameters_take_on_their_stored_dtype(model: StreamedModel) -> None:
    norm = model.module.get_parameter(NORM)
    norm.mul_(1.2345)
    changes = outside_changes(model)
    assert list(changes.tensors) == [NORM]
    assert changes.tensors[NORM].dtype == torch.bfloat16
    assert torch.equal(norm, changes.tensors[NORM].float())


def test_a_head_that_was_untied_is_added(model: StreamedModel) -> None:
    untie(model)
    model.module.get_parameter(EMBEDDING).mul_(1.2345)
    changes = outside_changes(model)
    assert list(changes.tensors) == [EMBEDDING]
    assert list(changes.added) == [HEAD]
    assert torch.equal(changes.added[HEAD], model.artifact.tensor(EMBEDDING))
    assert changes.config_updates == {"tie_word_embeddings": False}


def test_embedding_that_changes_with_its_tied_head_is_stored_once(model: StreamedModel) -> None:
    model.module.get_parameter(EMBEDDING).mul_(1.2345)
    changes = outside_changes(model)
    assert list(changes.tensors) == [EMBEDDING]
    assert not changes.added


@pytest.mark.parametrize("scheme", [w8a8(), weight_only(8, 32)], ids=lambda scheme: scheme.label)
def test_quantized_head_replaces_a_tied_one(
    model: StreamedModel, monkeypatch: pytest.MonkeyPatch, scheme: object
) -> None:
    monkeypatch.setattr("quantpipe.quantize.loop.outside.ROWS_AT_ONCE", 50)  # three parts of 128 rows
    untie(model)
    result, changes = solve_outside(model, {"lm_head": scheme}, outside_changes(model))  # type: ignore[dict-item]
    weight = result.weights["lm_head"]
    assert weight.scale_NG.dtype == torch.bfloat16
    assert not changes.added
    assert changes.config_updates == {"tie_word_embeddings": False}
    expected = model.module.get_parameter(HEAD)
    relative = (weight.dequantized() - expected).square().sum() / expected.square().sum()
    assert result.layers[0].error_after == pytest.approx(float(relative), rel=1e-4)
    assert result.layers[0].error_after <= result.layers[0].error_before < 1e-3
