"""The part of a recipe that says how the weights become small: transforms, one solver, schemes, and the KV cache.

The docstrings under the fields are the descriptions in the JSON schema and in ``recipes/README.md``.
"""

from typing import Annotated, Literal

from pydantic import Field

from quantpipe.recipe.section import Count, Pattern, Section, Seed, or_text

GroupSize = Literal[32, 64, 128, "channel"]


class RtnSolver(Section):
    """Round to nearest. Needs `calibration` only for `scales: hessian`."""

    name: Literal["rtn"]
    """The solver."""
    scales: Literal["absmax", "mse", "hessian"] = "absmax"
    """What a scale is chosen by: the largest weight, the rounding error, or the rounding error weighted with how
    strongly each input is used. The last costs a pass over the calibration set and is far better at 4 bits."""


class GptqSolver(Section):
    """GPTQ: rounds column by column and lets the later columns make up for the error. Needs `calibration`."""

    name: Literal["gptq"]
    """The solver."""
    damp_frac: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Damping added to the Hessian's diagonal, as a fraction of its mean."""
    propagate: Literal["quantized", "full", "both"] = "quantized"
    """What a layer is calibrated on: what the quantized layers before it give out, what the full-precision ones do, or
    the one with the other as the aim (asymmetric calibration: about twice the time, often better)."""
    sequential: bool = True
    """Whether the linears of a layer are solved one group after another, each seeing its quantized predecessors."""
    correction_frac: Annotated[float, Field(gt=0, le=1)] = 0.25
    """With `propagate: both`, how much of the difference between the two inputs is made up for."""
    signed_scales: bool = False
    """Whether a group's scale may be negative, which lets it use the extra negative level on either side. A little more
    accurate; our runtime and transformers read it, other kernels may not."""


class SmoothquantTransform(Section):
    """Moves outlier channels of the activations into the weights. For schemes with 8-bit activations."""

    name: Literal["smoothquant"]
    """The transform."""


class AwqTransform(Section):
    """Scales up the weights of the channels that matter most, so that they are rounded more finely."""

    name: Literal["awq"]
    """The transform."""


class RotateTransform(Section):
    """Rotates the residual stream and the heads' values, which spreads outliers evenly. Unties the output head."""

    name: Literal["rotate"]
    """The transform. It comes first, and not together with `awq`."""
    kind: Literal["hadamard", "orthogonal"] = "hadamard"
    """Hadamard matrices (in blocks, where the size has none), or random orthogonal ones."""
    seed: Seed = 0
    """Which signs or which random matrix."""


class KSmoothTransform(Section):
    """Evens out the channels of keys, for an 8-bit or 4-bit KV cache of models with large key biases."""

    name: Literal["k_smooth"]
    """The transform."""


Transform = SmoothquantTransform | AwqTransform | RotateTransform | KSmoothTransform
NamedTransform = Annotated[Transform, Field(discriminator="name", json_schema_extra=or_text)]
Solver = RtnSolver | GptqSolver


class W4A16(Section):
    """4-bit weights; activations stay in floating point."""

    name: Literal["w4a16"]
    """The scheme."""
    group_size: GroupSize = 64
    """Inputs that share a scale; it must divide the input width of every quantized linear. `channel`: one scale per
    output channel."""
    symmetric: bool = True
    """Whether a scale is all there is; otherwise each group also has a zero point. transformers reads the latter only
    when told to dequantize."""


class W3A16(Section):
    """3-bit weights; activations stay in floating point."""

    name: Literal["w3a16"]
    """The scheme."""
    group_size: GroupSize = 64
    """As in `w4a16`."""
    symmetric: bool = True
    """As in `w4a16`."""


class W8A16(Section):
    """8-bit weights; activations stay in floating point."""

    name: Literal["w8a16"]
    """The scheme."""
    group_size: GroupSize = "channel"
    """As in `w4a16`."""
    symmetric: bool = True
    """As in `w4a16`."""


class W8A8(Section):
    """8-bit weights with one scale per output channel; activations 8-bit, scaled per token at run time."""

    name: Literal["w8a8"]
    """The scheme."""


WeightOnly = W4A16 | W3A16 | W8A16
Scheme = WeightOnly | W8A8


class OverrideSection(Section):
    """Linears that are stored in another scheme than the rest."""

    modules: Annotated[tuple[Pattern, ...], Field(strict=False, min_length=1)]
    """Exact module names, or `re:` and a regular expression. `lm_head` may be among them (in 8 bits) if it is taken
    from `ignore`; it is then stored apart from the embedding."""
    scheme: Scheme = Field(discriminator="name", json_schema_extra=or_text)
    """What is stored for them."""


class AllocateSection(Section):
    """Gives more bits to the linears that need them most, measured by what each costs in KL divergence alone."""

    scheme: Scheme = Field(discriminator="name", json_schema_extra=or_text)
    """The scheme of the chosen linears; it has more bits than `quantize.scheme`."""
    average_bits: Annotated[float, Field(gt=0, le=16)] | None = None
    """The budget: bits per quantized weight on average, scales included. Give this or `max_bytes`."""
    max_bytes: Count | None = None
    """The budget: bytes of all quantized weights together, scales included."""
    num_tokens: Annotated[int, Field(ge=64)] = 256
    """Calibration tokens that the divergence is measured on."""


class QuantizeSection(Section):
    """How the weights become small: transforms, then one solver, into one scheme or several."""

    transforms: Annotated[tuple[NamedTransform, ...], Field(strict=False)] = ()
    """Rewritings that leave the model's function as it is and make it easier to quantize, in order. All need
    `calibration`. A name is short for a mapping that holds it: `[awq]` for `[{name: awq}]`."""
    solver: Solver = Field(discriminator="name", json_schema_extra=or_text)
    """How the rounded weights are found. `solver: rtn` is short for `solver: {name: rtn}`."""
    scheme: Scheme = Field(discriminator="name", json_schema_extra=or_text)
    """What is stored. `scheme: w8a8` is short for `scheme: {name: w8a8}`."""
    overrides: Annotated[tuple[OverrideSection, ...], Field(strict=False)] = ()
    """Linears stored in another scheme. Where several entries name a linear, the last counts."""
    allocate: AllocateSection | None = None
    """Spend a budget of bits where it helps most."""
    ignore: Annotated[tuple[Pattern, ...], Field(strict=False)] = ("lm_head",)
    """Linears left as they are: exact module names, or `re:` and a regular expression."""
    kv_cache: Literal["auto", "int8_per_token_head", "int8_static", "k_int8_v_int4", "int4_per_token_head"] = "auto"
    """How keys and values are cached when serving: in the compute dtype; in 8 bits, scaled per token and head or with
    scales from calibration; keys in 8 and values in 4 bits; or both in 4."""
