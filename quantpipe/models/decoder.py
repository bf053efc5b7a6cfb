"""Builds the description of a decoder out of config.json and what its family does its own way."""

from dataclasses import dataclass

from quantpipe.errors import ArtifactError, UnservedError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import ANOTHER_RUNTIME, eos_token_ids, optional_int, positive_number, required_int
from quantpipe.models.description import (
    Activation,
    AttentionSpec,
    DecoderDescription,
    LayerDescription,
    LinearSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)

DEFAULT_NORM_EPS = 1e-6  # where a config.json leaves it out
# As config.json calls them.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Biases:
    """Which linears of a layer have one."""

    query_key_value: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class DecoderForm:
    """What tells a family's decoder from another's beyond sizes. ``ropes`` and ``windows`` are those of each layer.

    ``softmax_scale`` None means 1 / sqrt(head_dim). ``is_fused``: query, key and value rows lie in one tensor, gate and
    up rows in another. ``is_sandwiched``: attention and MLP are normed behind as well, under Gemma's names.
    """

    head_dim: int
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    biases: Biases = Biases()
    activation: Activation = "silu"
    norm_eps: float = DEFAULT_NORM_EPS
    norm_offset: float = 0.0
    softmax_scale: float | None = None
    embedding_scale: float = 1.0
    has_head_norms: bool = False
    is_sandwiched: bool = False
    is_fused: bool = False
    is_tied_by_default: bool = False


def default_head_dim(artifact: Artifact) -> int:
    """``head_dim``, or what hidden_size leaves for each head."""
    if artifact.config.get("head_dim") is not None:
        return required_int(artifact, "head_dim")
    hidden_size, num_heads = required_int(artifact, "hidden_size"), required_int(artifact, "num_attention_heads")
    if hidden_size % num_heads:
        raise ArtifactError(
            f"{artifact.folder}/config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}, and there is no head_dim"
        )
    return hidden_size // num_heads


def activation_of(artifact: Artifact, key: str = "hidden_act", default: str = "silu") -> Activation:
    """The function that gates the MLP; ``default`` where config.json leaves it out."""
    found = str(artifact.config.get(key, default))
    if found not in ACTIVATIONS:
        where = f"{artifact.folder}/config.json"
        raise UnservedError(
            f"{where}: {key} '{found}' is not supported by this runtime{suggest(found, ACTIVATIONS)}; {ANOTHER_RUNTIME}"
        )
    return ACTIVATIONS[found]


def every_layer(artifact: Artifact, rope: RopeSpec) -> tuple[RopeSpec, ...]:
    """One rope for all layers."""
    return (rope,) * required_int(artifact, "num_hidden_layers")


def describe_decoder(artifact: Artifact, form: DecoderForm) -> DecoderDescription:
    """The decoder of a config.json in this form. ArtifactError where a size is missing or does not fit."""
    config = artifact.config
    hidden_size, vocab_size = required_int(artifact, "hidden_size"), required_int(artifact, "vocab_size")
    is_head_tied = bool(config.get("tie_word_embeddings", form.is_tied_by_default))
    lm_head = LinearSpec("lm_head", vocab_size, hidden_size, False, artifact.scheme_of("lm_head"))
    if is_head_tied and lm_head.scheme is not None:
        raise ArtifactError(
            f"{artifact.folder}/config.json: tie_word_embeddings is true, yet lm_head is stored quantized; "
            "an artifact with a quantized lm_head stores both tensors and says false"
        )
    layers = _Layers(artifact, form, hidden_size)
    max_positions, notes = _limit(required_int(artifact, "max_position_embeddings"), form)
    return DecoderDescription(
        family=str(config["model_type"]),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_position_embeddings=max_positions,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=eos_token_ids(artifact),
        embedding_name="model.embed_tokens.weight",
        layers=tuple(layers.describe(index) for index in range(required_int(artifact, "num_hidden_layers"))),
        final_norm=layers.norm("model.norm", hidden_size),
        lm_head=lm_head,
        is_head_tied=is_head_tied,
        embedding_scale=form.embedding_scale,
        notes=notes,
    )


def _limit(max_positions: int, form: DecoderForm) -> tuple[int, tuple[str, ...]]:
    """The longest context, which a rope may limit, and what is to be said of that."""
    limit = min(rope.max_positions or max_positions for rope in form.ropes)
    if limit >= max_positions:
        return max_positions, ()
    note = f"rope: contexts end at {limit:,} of {max_positions:,} positions; beyond, this rope would turn cached keys"
    return limit, (f"{note} anew",)


class _Layers:
    """Describes one layer after the other; holds the sizes that all share."""

    def __init__(self, artifact: Artifact, form: DecoderForm, hidden_size: int) -> None:
        self.artifact, self.form, self.hidden_size = artifact, form, hidden_size
        self.num_heads = required_int(artifact, "num_attention_heads")
        self.num_kv_heads = optional_int(artifact, "num_key_value_heads", None) or self.num_heads
        self.intermediate_size = required_int(artifact, "intermediate_size")
        if self.num_heads % self.num_kv_heads:
            raise ArtifactError(
                f"{artifact.folder}/config.json: num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        self.norm_eps = positive_number(artifact, "rms_norm_eps", form.norm_eps)

    def norm(self, name: str, size: int) -> NormSpec:
        return NormSpec(name, size, self.norm_eps, self.form.norm_offset)

    def describe(self, index: int) -> LayerDescription:
        prefix, is_sandwiched = f"model.layers.{index}", self.form.is_sandwiched
        before_mlp = "pre_feedforward_layernorm" if is_sandwiched else "post_attention_layernorm"
        after = ("post_attention_layernorm", "post_feedforward_layernorm") if is_sandwiched else ()
        norms = [self.norm(f"{prefix}.{name}", self.hidden_size) for name in ("input_layernorm", before_mlp, *after)]
        return LayerDescription(norms[0], self._attention(index, prefix), norms[1], self._mlp(prefix), *norms[2:])

    def _attention(self, index: int, prefix: str) -> AttentionSpec:
        form, prefix = self.form, f"{prefix}.self_attn"
        query_size, kv_size = self.num_heads * form.head_dim, self.num_kv_heads * form.head_dim
        names = ["qkv_proj"] * 3 if form.is_fused else ["q_proj", "k_proj", "v_proj"]
        query, key, value = self._stack(prefix, names, [query_size, kv_size, kv_size], form.biases.query_key_value)
        head_norms = [self.norm(f"{prefix}.{name}", form.head_dim) for name in ("q_norm", "k_norm")]
        return AttentionSpec(
            query=query,
            key=key,
            value=value,
            output=self._linear(f"{prefix}.o_proj", self.hidden_size, query_size, form.biases.output),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=form.head_dim,
            softmax_scale=form.head_dim**-0.5 if form.softmax_scale is None else form.softmax_scale,
            rope=form.ropes[index],
            query_norm=head_norms[0] if form.has_head_norms else None,
            key_norm=head_norms[1] if form.has_head_norms else None,
            window=form.windows[index],
        )

    def _mlp(self, prefix: str) -> MlpSpec:
        prefix, size, has_bias = f"{prefix}.mlp", self.intermediate_size, self.form.biases.mlp
        names = ["gate_up_proj"] * 2 if self.form.is_fused else ["gate_proj", "up_proj"]
        gate, up = self._stack(prefix, names, [size, size], has_bias)
        down = self._linear(f"{prefix}.down_proj", self.hidden_size, size, has_bias)
        return MlpSpec(gate, up, down, self.form.activation)

    def _stack(self, prefix: str, names: list[str], sizes: list[int], has_bias: bool) -> list[LinearSpec]:
        """Linears that read the hidden state; those that share a name lie one below the other in one tensor."""
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        return [
            self._linear(
                f"{prefix}.{name}",
                size,
                self.hidden_size,
                has_bias,
                rows=(end - size, end) if self.form.is_fused else None,
            )
            for name, size, end in zip(names, sizes, ends, strict=True)
        ]

    def _linear(
        self, name: str, out_features: int, in_features: int, has_bias: bool, rows: tuple[int, int] | None = None
    ) -> LinearSpec:
        return LinearSpec(name, out_features, in_features, has_bias, self.artifact.scheme_of(name), rows)
