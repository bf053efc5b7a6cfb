"""A random two-layer Llama, written by hand: importing transformers takes longer than most tests with it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantpipe.engine.tokenizer import Tokenizer

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": True,
}
LAYER_SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
}


def write_random_llama(folder: Path, tokenizer: Tokenizer, seed: int = 0) -> None:
    """Write it, with this tokenizer."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {"model.embed_tokens": (258, 64), "model.norm": (64,)}
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in LAYER_SHAPES.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    tokenizer._core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens))
    (folder / "chat_template.jinja").write_text(str(tokenizer.chat_template))
