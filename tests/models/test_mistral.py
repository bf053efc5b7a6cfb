"""Mistral's layers share one window; a config.json that leaves it out means 4,096 tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.errors import ArtifactError
from quantpipe.formats.artifact import Artifact
from quantpipe.models import describe

MakeFolder = Callable[..., Path]
LONG = {"model_type": "mistral", "max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("edits", "window"),
    [
        ({"sliding_window": 128}, 128),
        ({}, 4096),
        ({"max_position_embeddings": 4096}, None),
        ({"sliding_window": 128, "layer_types": ["sliding_attention"] * 2}, 128),
    ],
)
def test_every_layer_has_the_window_unless_no_context_outgrows_it(
    make_folder: MakeFolder, edits: dict[str, Any], window: int | None
) -> None:
    described = describe(Artifact.open(make_folder({**LONG, **edits})))
    assert [layer.attention.window for layer in described.layers] == [window, window]


def test_layers_of_both_types_are_not_a_mistral(make_folder: MakeFolder) -> None:
    kinds = ["full_attention", "sliding_attention"]
    folder = make_folder({**LONG, "sliding_window": 128, "layer_types": kinds})
    with pytest.raises(ArtifactError, match="layer_types has full_attention, yet sliding_window 128 is every layer's"):
        describe(Artifact.open(folder))
