"""Artifacts written once and committed: a change of what the stored numbers mean breaks these tests."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantpipe.backends import BACKENDS
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.formats.artifact import verify

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_golden_artifact_is_intact(name: str) -> None:
    assert verify(GOLDEN / name) == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_golden_artifact_still_gives_its_logits(name: str, backend: str) -> None:
    expected = load_file(GOLDEN / f"{name}.logits")
    rows: dict[int, torch.Tensor] = {}
    engine = Engine.open(GOLDEN / name, EngineConfig(backend=backend, max_model_len=16, num_threads=1))
    engine.generate(
        [expected["token_ids"].tolist()],
        SamplingParams(max_tokens=0),
        prompt_logits_sinks=[
            lambda first, logits: rows.update({first + i: torch.tensor(row) for i, row in enumerate(logits)})
        ],
    )
    found = torch.stack([rows[position] for position in range(len(rows))])
    # exact but for the order of float32 sums; torch's 4-bit kernel reads activations as bfloat16
    tolerance = 0.05 if (backend, name) == ("torch", "w4a16") else 1e-3
    assert torch.allclose(found, expected["logits"], atol=tolerance * float(expected["logits"].abs().max()))
