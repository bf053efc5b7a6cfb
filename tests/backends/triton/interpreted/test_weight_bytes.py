"""What weights take on the GPU is known before they are loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantpipe.backends.triton import TritonBackend
from quantpipe.backends.triton.weight_bytes import weight_bytes
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.scheme import w4a16, w8a8, weight_only
from quantpipe.models import describe

MIXED = {"k_proj": weight_only(8, None), "down_proj": weight_only(3, 64), "lm_head": weight_only(8, 32), "": w4a16(64)}
SCHEMES = {
    "none": None,
    "w4a16": w4a16(32),
    "asymmetric": weight_only(4, 64, symmetric=False),
    "w3": weight_only(3, None, symmetric=False),
    "w8a8": w8a8(),
    "mixed": MIXED,
}


@pytest.mark.parametrize(
    ("name", "is_tied"), [*((name, False) for name in SCHEMES), ("none", True), ("w4a16", True)], ids=str
)
def test_count_from_headers_is_what_a_loaded_model_holds(
    name: str, is_tied: bool, make_folder: Callable[..., Path]
) -> None:
    folder = make_folder(SCHEMES[name], tie_word_embeddings=is_tied)
    executor, artifact = TritonBackend().load(folder, 127.0, None), Artifact.open(folder)
    assert weight_bytes(describe(artifact), artifact, torch.float32).held_bytes == executor.weight_bytes
