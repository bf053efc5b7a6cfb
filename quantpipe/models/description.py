"""A decoder-only transformer as data: what its layers compute and which stored tensors they read. Executes nothing.

A family file builds it from a config.json; every backend executes it.
"""

from dataclasses import dataclass

from quantpipe.formats.scheme import WeightScheme


@dataclass(frozen=True)
class LinearSpec:
    """y = x @ weight.T (+ bias). ``scheme`` None means that the weight is stored in floating point."""

    name: str
    out_features: int
    in_features: int
    has_bias: bool
    scheme: WeightScheme | None


@dataclass(frozen=True)
class NormSpec:
    """RMS norm over the hidden dimension: x / sqrt(mean(x^2) + eps) * weight."""

    name: str
    eps: float


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the dimension pairs (i, i + head_dim / 2).

    Pair i turns by position * ``inverse_frequencies[i]`` radians. Every supported kind of rope comes down to these.
    """

    inverse_frequencies: tuple[float, ...]


@dataclass(frozen=True)
class AttentionSpec:
    """Causal softmax attention; query head h reads KV head h // (num_heads / num_kv_heads). Rope before the cache."""

    query: LinearSpec
    key: LinearSpec
    value: LinearSpec
    output: LinearSpec
    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float


@dataclass(frozen=True)
class MlpSpec:
    """down(silu(gate(x)) * up(x))."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec


@dataclass(frozen=True)
class LayerDescription:
    """x += attention(attention_norm(x)), then x += mlp(mlp_norm(x))."""

    attention_norm: NormSpec
    attention: AttentionSpec
    mlp_norm: NormSpec
    mlp: MlpSpec


@dataclass(frozen=True)
class DecoderDescription:
    """embedding -> layers -> final_norm -> lm_head. ``is_head_tied`` means that lm_head reads the embedding's tensor.

    ``eos_token_ids`` joins what config.json and generation_config.json name, without repeats.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_name: str
    rope: RopeSpec
    layers: tuple[LayerDescription, ...]
    final_norm: NormSpec
    lm_head: LinearSpec
    is_head_tied: bool

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
        inner = [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        return (*inner, self.final_norm)
