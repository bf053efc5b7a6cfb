"""A decoder that the runtime does not serve, from the fields of its config.json as far as they are known.

What a config does not say is assumed as most decoders have it, and said in the shape's notes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quantpipe.errors import ArtifactError
from quantpipe.plan.shape import AttentionShape, LinearShape, ModelShape

# What different families call the same field.
NAMES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    "sliding_window": ("sliding_window",),
}
# An MLP of two matrices; every other family is taken to have three.
UNGATED = {"gpt2", "opt", "gpt_neox", "gptj", "gpt_neo", "bloom", "falcon", "phi", "gpt_bigcode", "starcoder2", "mpt"}
# Fields of structures whose keys and values are no heads: sums by heads would be wrong.
OTHER_CACHES = ("kv_lora_rank", "ssm_cfg", "state_size", "mamba_d_state", "linear_num_value_heads")
DEFAULT_FFN_FACTOR = 4


class _Fields:
    """The numbers of one config."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self.where = config, where

    def number(self, key: str) -> int | None:
        """A positive whole number; None where none of its names is there. ArtifactError for anything else."""
        for name in NAMES[key]:
            value = self._config.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArtifactError(f"{self.where}: {name}: {value!r} is not a positive whole number")
            return value
        return None

    def required(self, key: str) -> int:
        value = self.number(key)
        if value is None:
            raise ArtifactError(f"{self.where}: {key}: missing, and nothing can be planned without; add the number")
        return value


def shape_from_fields(config: Mapping[str, Any], where: str, float_bytes: int) -> ModelShape:
    """ArtifactError that names file and key where a field is missing or no number."""
    for key in OTHER_CACHES:
        if config.get(key) is not None:
            raise ArtifactError(f"{where}: {key}: keys and values of this kind of layer cannot be planned")
    fields, family = _Fields(config, where), str(config.get("model_type", "unknown"))
    num_layers, hidden_size = fields.required("num_hidden_layers"), fields.required("hidden_size")
    attention, vocab_size = _attention(fields, hidden_size), fields.required("vocab_size")
    is_gated = family not in UNGATED
    intermediate_size = fields.number("moe_intermediate_size") or _intermediate_size(fields, hidden_size, is_gated)
    layer = [*_attention_linears(attention, hidden_size), *_mlp(fields, hidden_size, intermediate_size, is_gated)]
    linears = tuple(
        replace(part, name=f"model.layers.{index}.{part.name}") for index in range(num_layers) for part in layer
    )
    return ModelShape(
        where=where,
        family=family,
        is_served=False,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_positions=fields.number("max_position_embeddings") or 0,
        linears=linears,
        lm_head=LinearShape("lm_head", vocab_size, hidden_size),
        is_head_tied=bool(config.get("tie_word_embeddings", False)),
        num_norm_weights=(2 * num_layers + 1) * hidden_size,
        attention=(attention,) * num_layers,
        intermediate_size=intermediate_size,
        float_bytes=float_bytes,
        notes=_notes(fields, family, is_gated),
    )


def _attention(fields: _Fields, hidden_size: int) -> AttentionShape:
    num_heads = fields.required("num_attention_heads")
    head_dim = fields.number("head_dim") or hidden_size // num_heads
    if head_dim < 1:
        raise ArtifactError(f"{fields.where}: num_attention_heads: {num_heads} exceeds hidden_size {hidden_size}")
    return AttentionShape(num_heads, fields.number("num_key_value_heads") or num_heads, head_dim)


def _intermediate_size(fields: _Fields, hidden_size: int, is_gated: bool) -> int:
    """Families of two matrices mostly leave it out."""
    if is_gated:
        return fields.required("intermediate_size")
    return fields.number("intermediate_size") or DEFAULT_FFN_FACTOR * hidden_size


def _attention_linears(attention: AttentionShape, hidden_size: int) -> list[LinearShape]:
    query_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    return [
        LinearShape("self_attn.q_proj", query_size, hidden_size),
        LinearShape("self_attn.k_proj", kv_size, hidden_size),
        LinearShape("self_attn.v_proj", kv_size, hidden_size),
        LinearShape("self_attn.o_proj", hidden_size, query_size),
    ]


def _mlp(fields: _Fields, hidden_size: int, intermediate_size: int, is_gated: bool) -> list[LinearShape]:
    """Of one layer: an MLP, or experts with their router and what all tokens share."""
    num_experts = fields.number("num_experts")
    if num_experts is None:
        return _matrices("mlp", hidden_size, intermediate_size, is_gated)
    num_used = fields.required("num_experts_per_tok")
    experts = _matrices("mlp.experts", hidden_size, intermediate_size, is_gated)
    parts = [replace(part, num_copies=num_experts, num_used=min(num_used, num_experts)) for part in experts]
    shared_size = fields.number("shared_expert_intermediate_size")
    shared = [] if shared_size is None else _matrices("mlp.shared_expert", hidden_size, shared_size, is_gated)
    return [*parts, *shared, LinearShape("mlp.gate", num_experts, hidden_size)]


def _matrices(prefix: str, hidden_size: int, intermediate_size: int, is_gated: bool) -> list[LinearShape]:
    up_names = ("gate_proj", "up_proj") if is_gated else ("up_proj",)
    ups = [LinearShape(f"{prefix}.{name}", intermediate_size, hidden_size) for name in up_names]
    return [*ups, LinearShape(f"{prefix}.down_proj", hidden_size, intermediate_size)]


def _notes(fields: _Fields, family: str, is_gated: bool) -> tuple[str, ...]:
    mlp = "three matrices" if is_gated else "two matrices"
    notes = [
        f"model_type '{family}' is not served by the bundled runtime: planned from its config, no biases, every layer "
        f"alike, an MLP of {mlp}"
    ]
    if fields.number("num_experts") is not None:
        notes.append("every layer is taken to have experts, and tokens to choose theirs at random")
    if fields.number("sliding_window") is not None:
        notes.append(
            "sliding_window is not counted: which layers have it is not known here, so keys and values are an "
            "upper bound"
        )
    return tuple(notes)
