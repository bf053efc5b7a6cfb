"""What kind of value each known field of a config.json must hold, for whoever reads it later: a size, a flag, a token.

Only fields that are there are looked at, and null is left to the reader: whether a model needs a field, and which of
its values can be run, is not known here. Sizes of layers may be lists, one entry for each.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from quantpipe.errors import ArtifactError

# Sizes that no model comes near; what is computed from them must stay computable.
MOST, MOST_WIDE = 2**31 - 1, 2**20
WIDTHS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("n_embd", "n_head", "n_layer"),
)
SIZES = (
    *WIDTHS,
    *("intermediate_size", "vocab_size", "max_position_embeddings", "n_positions", "n_inner", "ffn_dim"),
    *("word_embed_proj_dim", "moe_intermediate_size", "original_max_position_embeddings"),
)
NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_local_base_freq"),
    "query_pre_attn_scalar",
)
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_bidirectional_attention")
MAPPINGS = ("rope_parameters", "rope_scaling", "quantization_config", "auto_map")
NAMES = ("layer_types", "architectures")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
LAYERS = ("num_hidden_layers", "n_layer")
_MOST_SHOWN = 60


def check_kinds(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ArtifactError for the first field of ``config``, read from ``path``, that holds another kind of value."""
    for keys, is_right, wanted in _KINDS:
        for key in keys:
            value = config.get(key)
            if value is not None and not is_right(value):
                raise ArtifactError(f"{path}: {key}: {shown(value)} is not {wanted}; correct it, or fetch it again")
    for key in WIDTHS:
        if isinstance(value := config.get(key), int) and value > MOST_WIDE:
            raise ArtifactError(f"{path}: {key}: {value:,} is more than any model has; correct it, or fetch it again")


def check_num_layers(path: Path, config: Mapping[str, Any], num_tensors: int) -> None:
    """Raise ArtifactError where ``config`` has more layers than there are tensors: none has less than one."""
    for key in LAYERS:
        found = config.get(key)
        if num_tensors and isinstance(found, int) and found > num_tensors:
            raise ArtifactError(f"{path}: {key}: {found:,} layers, and the folder holds {num_tensors:,} tensors")


def shown(value: object) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def is_size(value: object) -> TypeGuard[int]:
    """Whether ``value`` is a whole number from 1 on that something may have as its size."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def is_positive(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _are_sizes(value: object) -> bool:
    return is_size(value) or (isinstance(value, list) and bool(value) and all(map(is_size, value)))


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST


def _are_tokens(value: object) -> bool:
    return _is_token(value) or (isinstance(value, list) and all(map(_is_token, value)))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_KINDS: tuple[tuple[tuple[str, ...], Callable[[object], bool], str], ...] = (
    (("model_type",), lambda value: isinstance(value, str), "text"),
    (SIZES, _are_sizes, "a positive whole number"),
    (NUMBERS, is_positive, "a number above 0"),
    (FLAGS, lambda value: isinstance(value, bool), "true or false"),
    (MAPPINGS, lambda value: isinstance(value, dict), "a mapping"),
    (NAMES, _are_names, "a list of names"),
    (TOKENS, _are_tokens, "a token id or a list of them"),
)
