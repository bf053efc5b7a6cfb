"""Configs of well-known shapes, and plans without measuring a machine."""

import json
from pathlib import Path
from typing import Any

from quantpipe.plan.devices import DEVICES, Device
from quantpipe.plan.shape import ModelShape
from quantpipe.plan.subject import read_subject

# 32 layers, 8 KV heads of 128.
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA2_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
MISTRAL_7B = LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096, "vocab_size": 32000}
GEMMA3_4B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "torch_dtype": "bfloat16",
}
MIXTRAL = LLAMA_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
# 10 GB, 100 GB/s, 1 and 2 TFLOP/s: sums that can be done by hand.
ROUND_GPU = Device("round", "gpu", 10**10, 1e11, 1e12, 2e12, 1e12, "made up")
ROUND_CPU = Device("round", "cpu", 10**10, 1e11, 1e12, 2e12, 1e12, "made up")
H100 = DEVICES["H100"]


def write_config(folder: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def shape_in(folder: Path, config: dict[str, Any]) -> ModelShape:
    return read_subject(write_config(folder, config), (), None, folder).shape
