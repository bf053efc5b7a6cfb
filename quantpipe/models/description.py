"""A decoder-only transformer as data: what its layers compute and which stored tensors they read. Executes nothing.

A family file builds it from a config.json; every backend executes it.
"""

from dataclasses import dataclass
from typing import Literal

from quantpipe.formats.scheme import WeightScheme

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LinearSpec:
    """y = x @ weight.T (+ bias). ``scheme`` None means that the weight is stored in floating point.

    ``rows`` (first, end) are the output features of this linear where the stored tensor holds those of several, one
    below the other; None where the tensor is all its own.
    """

    name: str
    out_features: int
    in_features: int
    has_bias: bool
    scheme: WeightScheme | None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class NormSpec:
    """RMS norm over the last dimension, of ``size``: x / sqrt(mean(x^2) + eps) * (offset + stored weight)."""

    name: str
    size: int
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first 2P dimensions of a head, in pairs (i, i + P); the others stay as they are.

    Pair i of the P ``inverse_frequencies`` turns by position * ``inverse_frequencies[i]`` radians and is stretched by
    ``attention_scale``. Every supported kind of rope comes down to these. Where a kind turns sooner positions otherwise
    once a text grows beyond ``max_positions``, it holds up to there; None means everywhere.
    """

    inverse_frequencies: tuple[float, ...]
    attention_scale: float = 1.0
    max_positions: int | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Causal softmax attention; query head h reads KV head h // (num_heads / num_kv_heads).

    Queries and keys are normed per head where there is a norm, then turned by ``rope``, and cached so. With a
    ``window`` a token sees itself and the ``window`` - 1 tokens before it.
    """

    query: LinearSpec
    key: LinearSpec
    value: LinearSpec
    output: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    rope: RopeSpec
    query_norm: NormSpec | None = None
    key_norm: NormSpec | None = None
    window: int | None = None


@dataclass(frozen=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x))."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec
    activation: Activation = "silu"


@dataclass(frozen=True)
class LayerDescription:
    """x += post_attention_norm(attention(attention_norm(x))), then x += post_mlp_norm(mlp(mlp_norm(x))).

    A norm after a part is there or None.
    """

    attention_norm: NormSpec
    attention: AttentionSpec
    mlp_norm: NormSpec
    mlp: MlpSpec
    post_attention_norm: NormSpec | None = None
    post_mlp_norm: NormSpec | None = None


@dataclass(frozen=True)
class DecoderDescription:
    """embedding * embedding_scale -> layers -> final_norm -> lm_head.

    ``is_head_tied`` means that lm_head reads the embedding's tensor. ``eos_token_ids`` joins what config.json and
    generation_config.json name, without repeats. ``notes`` are lines that a user should know.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_name: str
    layers: tuple[LayerDescription, ...]
    final_norm: NormSpec
    lm_head: LinearSpec
    is_head_tied: bool
    embedding_scale: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many tokens each layer looks back on; None: all."""
        return tuple(layer.attention.window for layer in self.layers)

    def linears(self) -> tuple[LinearSpec, ...]:
        """Every linear in order of execution, lm_head last."""
        inner = [
            linear
            for layer in self.layers
            for linear in (
                layer.attention.query,
                layer.attention.key,
                layer.attention.value,
                layer.attention.output,
                layer.mlp.gate,
                layer.mlp.up,
                layer.mlp.down,
            )
        ]
        return (*inner, self.lm_head)

    def norms(self) -> tuple[NormSpec, ...]:
        """Every norm in order of execution."""
        inner = [
            norm
            for layer in self.layers
            for norm in (
                layer.attention_norm,
                layer.attention.query_norm,
                layer.attention.key_norm,
                layer.post_attention_norm,
                layer.mlp_norm,
                layer.post_mlp_norm,
            )
            if norm is not None
        ]
        return (*inner, self.final_norm)
