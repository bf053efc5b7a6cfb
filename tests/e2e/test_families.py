"""A run on each family that differs most from Llama: quantized, compared in three ways and judged like any other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import save_model

from quantpipe import cli
from quantpipe.formats.artifact import verify

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def random_model(folder: Path, family: str, tokenizer_of: Path) -> Path:
    """Untrained, so that nothing can be said of its accuracy; it reads text with the tokenizer of another model."""
    config = json.loads((tokenizer_of / "config.json").read_text())
    tokens = {key: config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    save_model(folder, family, torch.bfloat16, max_position_embeddings=512, **tokens)
    for name in TOKENIZER_FILES:
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("gemma3", "w8a8"),
        ("qwen3", "{name: w4a16, group_size: 32}"),
        ("phi3", "{name: w4a16, group_size: 32, symmetric: false}"),
    ],
)
def test_a_run_serves_the_family_and_agrees_with_transformers(
    make_project: Callable[[], Path], tmp_path: Path, tiny_llama: Path, family: str, scheme: str
) -> None:
    project, model = make_project(), random_model(tmp_path / family, family, tiny_llama)
    changes = [f"model={model}", f"quantize.scheme={scheme}"]
    arguments = [argument for change in changes for argument in ("--set", change)]
    # the verdict on a model that knows nothing may be any; parity that does not hold would end with 3
    assert cli.run(["run", str(project / "recipe.yaml"), "--quiet", *arguments]) in (0, 4, 5)
    assert verify(project / "run" / "artifact") == []
    rows = json.loads((project / "run" / "parity.json").read_text())["rows"]
    assert [row["comparison"] for row in rows] == [
        "base model: transformers, served",
        "simulated, reloaded by transformers",
        "simulated, served (text at once)",
        "simulated, served (token by token)",
    ]
    assert all(row["found"] <= row["tolerance"] for row in rows)
    assert "int8_per_token_head" in (project / "run" / "gate.json").read_text()
