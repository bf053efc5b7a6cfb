"""Tiny random model folders as transformers saves them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

MakeFolder = Callable[..., Path]

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Saves a tiny Llama; ``edits`` are then written over fields of its config.json (None removes a field)."""

    def make(edits: dict[str, Any] | None = None, **settings: Any) -> Path:
        torch.manual_seed(0)
        folder = tmp_path / "model"
        LlamaForCausalLM(LlamaConfig(**{**TINY, **settings})).save_pretrained(folder)
        path = folder / "config.json"
        config = {**json.loads(path.read_text(encoding="utf-8")), **(edits or {})}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), encoding="utf-8")
        return folder

    return make
