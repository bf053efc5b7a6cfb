"""A decoder as the planner counts it: matrices, heads and norms; made from a description or from a config."""

from dataclasses import dataclass, replace

from quantpipe.formats.scheme import WeightScheme
from quantpipe.models.description import DecoderDescription, LinearSpec


@dataclass(frozen=True)
class LinearShape:
    """Matrices of one name and size. ``num_copies`` are stored (experts), and a token reads ``num_used`` of them.

    ``scheme`` None means floating point.
    """

    name: str
    out_features: int
    in_features: int
    has_bias: bool = False
    scheme: WeightScheme | None = None
    num_copies: int = 1
    num_used: int = 1

    @property
    def num_weights(self) -> int:
        """Of all copies."""
        return self.num_copies * self.out_features * self.in_features

    @property
    def num_used_weights(self) -> int:
        """Of the copies that a token reads."""
        return self.num_used * self.out_features * self.in_features

    def num_read(self, num_tokens: int) -> float:
        """How many copies a step of so many tokens reads, if tokens choose theirs at random."""
        return self.num_copies * (1 - (1 - self.num_used / self.num_copies) ** num_tokens)


@dataclass(frozen=True)
class AttentionShape:
    """The heads of one layer; with a ``window`` a token sees so many tokens, itself among them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True)
class ModelShape:
    """All that the sums need. ``float_bytes`` are those of a number that is not quantized.

    ``linears`` leave out ``lm_head``. ``notes`` say what is assumed of a model that the runtime does not serve.
    """

    where: str
    family: str
    is_served: bool
    vocab_size: int
    hidden_size: int
    max_positions: int
    linears: tuple[LinearShape, ...]
    lm_head: LinearShape
    is_head_tied: bool
    num_norm_weights: int
    attention: tuple[AttentionShape, ...]
    intermediate_size: int
    float_bytes: int = 2
    notes: tuple[str, ...] = ()

    @property
    def num_weights(self) -> int:
        """Parameters, of norms and biases too; a tied head counts once."""
        biases = sum(each.num_copies * each.out_features for each in self.linears if each.has_bias)
        head = 0 if self.is_head_tied else self.lm_head.num_weights
        embedding = self.vocab_size * self.hidden_size
        return sum(each.num_weights for each in self.linears) + embedding + head + self.num_norm_weights + biases

    @property
    def scheme_label(self) -> str:
        """What its linears are stored in."""
        labels = dict.fromkeys(each.scheme.label if each.scheme else self.float_label for each in self.linears)
        return next(iter(labels)) if len(labels) == 1 else f"mixed ({', '.join(labels)})"

    @property
    def float_label(self) -> str:
        """What numbers that are not quantized are called by their size."""
        return {2: "bf16", 4: "float32"}.get(self.float_bytes, f"{8 * self.float_bytes}-bit")

    def in_scheme(self, scheme: WeightScheme | None) -> "ModelShape":
        """The same with every inner linear in ``scheme``. RecipeError where a group size does not divide one."""
        for each in self.linears:
            if scheme is not None:
                scheme.check_fits(each.name, each.in_features)
        return replace(self, linears=tuple(replace(each, scheme=scheme) for each in self.linears))


def shape_of(description: DecoderDescription, where: str, float_bytes: int) -> ModelShape:
    """Of a decoder that the runtime serves."""
    *inner, lm_head = (_linear_shape(spec) for spec in description.linears())
    return ModelShape(
        where=where,
        family=description.family,
        is_served=True,
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        max_positions=description.max_position_embeddings,
        linears=tuple(inner),
        lm_head=lm_head,
        is_head_tied=description.is_head_tied,
        num_norm_weights=sum(norm.size for norm in description.norms()),
        attention=tuple(
            AttentionShape(own.num_heads, own.num_kv_heads, own.head_dim, own.window)
            for own in (layer.attention for layer in description.layers)
        ),
        intermediate_size=description.layers[0].mlp.gate.out_features,
        float_bytes=float_bytes,
        notes=description.notes,
    )


def _linear_shape(spec: LinearSpec) -> LinearShape:
    return LinearShape(spec.name, spec.out_features, spec.in_features, spec.has_bias, spec.scheme)
