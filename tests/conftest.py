"""Models that many tests share: the committed trained one, and random ones whose weights do not matter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import MakeModel, save_model

from quantpipe.report import Reporter


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A trained 1.7M-parameter Llama in bfloat16: the only model here whose accuracy means something."""
    return Path(__file__).parent / "fixtures" / "tiny_llama"


@pytest.fixture(scope="session")
def random_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes folders of random Llamas (hidden 64, 2 layers, 4 heads over 2 KV heads) with config fields replaced."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
        settings: dict[str, Any] = {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**settings | fields))
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
        folder = tmp_path_factory.mktemp("random_llama")
        model.to(dtype).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Gives the folder of a tiny random model of a family (see ``ARCHITECTURES``), made once for each set of fields."""
    made: dict[str, Path] = {}

    def folder_of(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
        key = f"{name} {dtype} {sorted(fields.items())}"
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp(name), name, dtype, **fields)
        return made[key]

    return folder_of


@pytest.fixture
def quiet() -> Reporter:
    """A reporter that prints nothing."""
    return Reporter(quiet=True)
