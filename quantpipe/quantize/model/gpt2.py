"""A GPT-2 folder seen as one of OPT, which computes the same from ordinary Linears.

GPT-2 stores its weights transposed for a module of its own (Conv1D), and no reader loads a quantized one: transformers
and compressed-tensors quantize Linear modules only. OPT is the same decoder (learned positions, LayerNorm before
attention and MLP, biases, tied embeddings) from Linears, with two unused rows before its positions. So an artifact made
from GPT-2 is written as OPT, and every reader of OPT loads it.

Shapes: N out_features, K in_features, P positions, D hidden size.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from quantpipe.errors import ArtifactError, RecipeError
from quantpipe.formats.artifact import Artifact, StoredTensor
from quantpipe.formats.scheme import TensorSpec
from quantpipe.quantize.model.architecture import load_refusal

# OPT looks positions up two rows further down.
POSITION_OFFSET = 2
# Settings of GPT-2 that OPT has no counterpart for, and the value that it always computes with.
_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "layer_norm_epsilon": 1e-5,
}
_RENAMED = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "embd_pdrop": "dropout",
    "attn_pdrop": "attention_dropout",
    "initializer_range": "init_std",
}
_KEPT = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version")
_OUTSIDE = {
    "wte.weight": "embed_tokens.weight",
    "ln_f.weight": "final_layer_norm.weight",
    "ln_f.bias": "final_layer_norm.bias",
}
_INSIDE = {
    "ln_1": "self_attn_layer_norm",
    "ln_2": "final_layer_norm",
    "attn.c_proj": "self_attn.out_proj",
    "mlp.c_fc": "fc1",
    "mlp.c_proj": "fc2",
}
# Masks that old versions of transformers stored.
_UNUSED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_BLOCK = re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)")


def as_opt(base: Artifact) -> Artifact:
    """``base`` with the config and tensors of OPT if it is a GPT-2, made of the stored ones as they are read.

    Raises RecipeError for settings and tensors of GPT-2 that OPT does not have.
    """
    if base.config.get("model_type") != "gpt2":
        return base
    config = _opt_config(base)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in base.stored.items():
        short = name.removeprefix("transformer.")
        if not _UNUSED.fullmatch(short):
            stored |= dict(_opt_tensors(base, short, tensor))
    return replace(base, config=config, stored=stored)


def conversion_note(base: Artifact) -> str | None:
    """What a user should know of a ``base`` that ``as_opt`` has made of a GPT-2; None for any other."""
    if all(tensor.view is None for tensor in base.stored.values()):
        return None
    return "no reader loads a quantized GPT-2; it is written as OPT, which computes the same, under OPT's module names"


def _opt_config(base: Artifact) -> dict[str, Any]:
    from transformers import GPT2Config

    try:
        full: Mapping[str, Any] = GPT2Config(**base.config).to_dict()
    except Exception as error:  # whatever transformers says of values
        raise ArtifactError(f"{base.folder}/config.json: no GPT-2: {load_refusal(error)}") from error
    for key, value in _FIXED.items():
        if full[key] != value:
            raise RecipeError(
                f"{base.folder}: config.json: {key} {full[key]} has no counterpart in OPT, the form in which "
                f"readers load a quantized GPT-2; only {value} can be quantized"
            )
    config = {_RENAMED.get(key, key): base.config[key] for key in (*_RENAMED, *_KEPT) if key in base.config}
    return config | {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": full["n_embd"],
        "ffn_dim": full["n_inner"] or 4 * full["n_embd"],
        "activation_function": full["activation_function"],
        "word_embed_proj_dim": full["n_embd"],
        "tie_word_embeddings": full["tie_word_embeddings"],
        "num_hidden_layers": full["n_layer"],
        "num_attention_heads": full["n_head"],
        "max_position_embeddings": full["n_positions"],
        "vocab_size": full["vocab_size"],
    }


def _opt_tensors(base: Artifact, name: str, stored: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """The OPT tensors made from the GPT-2 tensor ``name`` (without the model's prefix)."""
    if name == "lm_head.weight":
        yield name, stored
    elif name in _OUTSIDE:
        yield f"model.decoder.{_OUTSIDE[name]}", stored
    elif name == "wpe.weight":
        num_positions, hidden_size = stored.spec.shape
        yield (
            "model.decoder.embed_positions.weight",
            _viewed(stored, (num_positions + POSITION_OFFSET, hidden_size), _with_unused_positions),
        )
    elif (parts := _BLOCK.fullmatch(name)) is not None:
        number, module, leaf = parts.groups()
        path = f"model.decoder.layers.{number}"
        is_weight = leaf == "weight" and not module.startswith("ln_")
        shape = stored.spec.shape[::-1]
        if module in _INSIDE:
            whole = _viewed(stored, shape, _transposed) if is_weight else stored
            yield f"{path}.{_INSIDE[module]}.{leaf}", whole
        elif module == "attn.c_attn":
            for part, letter in enumerate("qkv"):
                rows = (shape[0] // 3, *shape[1:])
                yield f"{path}.self_attn.{letter}_proj.{leaf}", _viewed(stored, rows, partial(_third, part=part))
        else:
            raise _unknown(base, stored)
    else:
        raise _unknown(base, stored)


def _viewed(stored: StoredTensor, shape: tuple[int, ...], view: Callable[[Tensor], Tensor]) -> StoredTensor:
    return replace(stored, spec=TensorSpec(stored.spec.dtype, shape), view=view)


def _transposed(weight_KN: Tensor) -> Tensor:
    return weight_KN.T.contiguous()


def _third(fused: Tensor, part: int) -> Tensor:
    """The rows of queries (0), keys (1) or values (2) of a transposed fused weight [K, N], or of its bias [N]."""
    return fused.T.chunk(3)[part].contiguous() if fused.ndim == 2 else fused.chunk(3)[part].clone()


def _with_unused_positions(table_PD: Tensor) -> Tensor:
    return pad(table_PD, (0, 0, POSITION_OFFSET, 0))


def _unknown(base: Artifact, stored: StoredTensor) -> RecipeError:
    return RecipeError(
        f"{base.folder}: tensor {stored.name} is none of GPT-2's known ones, so the model cannot be stored as OPT, the "
        "form in which readers load a quantized GPT-2"
    )
