"""Tiny random models of many decoder families: hidden 64, two blocks, every norm and bias away from its default.

Each is made from its transformers config and saved as its family stores checkpoints. Weights are drawn from a
generator of their own: the same model every time, and the caller's random state untouched.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

HIDDEN = 64
VOCABULARY = 128
NUM_BLOCKS = 2
# What nearly every family calls the same.
_SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts_per_tok": 2}

# Name -> the class of the config and the fields that differ from `_SHARED`.
_FIELDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        # one block of each attention type: sliding ones have a rope and a mask of their own
        {"head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3Config", {}),
    "opt": ("OPTConfig", {"ffn_dim": 128, "word_embed_proj_dim": HIDDEN}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt2": (
        "GPT2Config",
        {"n_embd": HIDDEN, "n_layer": NUM_BLOCKS, "n_head": 4, "n_positions": 256, "tie_word_embeddings": True},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None, **_EXPERTS}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": HIDDEN, "head_dim": 16, "norm_topk_prob": True, **_EXPERTS},
    ),
}
ARCHITECTURES = tuple(_FIELDS)
MIXTURES = ("mixtral", "qwen3_moe")

MakeModel = Callable[..., Path]


def config_of(name: str, **fields: Any) -> Any:
    """The transformers config of a tiny model, with ``fields`` replaced."""
    import transformers

    class_name, own = _FIELDS[name]
    settings = _SHARED | own | fields
    if name == "gpt2":
        for unknown in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            settings.pop(unknown, None)
    return getattr(transformers, class_name)(**settings)


def random_model(name: str, **fields: Any) -> nn.Module:
    """A float32 model in evaluation mode with weights drawn anew; norms and biases are no special values."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(config_of(name, **fields))
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def save_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """Write the tiny model ``name`` into ``folder`` as its family is stored."""
    random_model(name, **fields).to(dtype).save_pretrained(folder)  # type: ignore[operator]
    return folder
