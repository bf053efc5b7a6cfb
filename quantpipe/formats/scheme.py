"""Which tensors a quantized linear stores, and how it is declared to readers. Knows no tensor values.

``WeightScheme.tensors`` is the only list of what a layer stores: packer, verifier, loader and planner all read it.

Shapes: N out_features, K in_features, G groups along K (1 for a scale per output channel).
Source: the compressed-tensors format, ``pack-quantized`` and ``int-quantized``.
"""

from dataclasses import dataclass
from typing import Any

from quantpipe.errors import RecipeError

GROUP_SIZES = (32, 64, 128)
WEIGHT_ONLY_BITS = (3, 4, 8)
# Names of the two ways of storing integers.
PACKED, UNPACKED = "pack-quantized", "int-quantized"


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor: safetensors dtype name (``I32``, ``BF16`` ...) and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightScheme:
    """How one linear's weight (and the activations it reads) are represented.

    ``group_size`` None means one scale per output channel. ``activation_bits`` 8 means that inputs are
    quantized per token at run time, symmetric; None means they stay in floating point. A scheme that is not
    ``symmetric`` stores an integer zero point beside each scale.
    """

    name: str
    bits: int
    group_size: int | None
    activation_bits: int | None
    format: str
    symmetric: bool = True

    @property
    def label(self) -> str:
        """What people call it: ``w4a16 g64``, ``w8a16 channel``, ``w4a16 g64 asymmetric``."""
        groups = "channel" if self.group_size is None else f"g{self.group_size}"
        parts = [self.name, *([groups] if self.is_packed else []), *([] if self.symmetric else ["asymmetric"])]
        return " ".join(parts)

    @property
    def q_min(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def q_max(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def is_packed(self) -> bool:
        """Whether several weights share one stored 32-bit word."""
        return self.format == PACKED

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else in_features // self.group_size

    def tensors(self, out_features: int, in_features: int, scale_dtype: str) -> dict[str, TensorSpec]:
        """Suffix -> spec of everything stored for one linear of shape [N, K], bias apart."""
        num_groups = self.num_groups(in_features)
        scale = TensorSpec(scale_dtype, (out_features, num_groups))
        if not self.is_packed:
            return {"weight": TensorSpec("I8", (out_features, in_features)), "weight_scale": scale}
        stored = {
            "weight_packed": TensorSpec("I32", (out_features, num_words(in_features, self.bits))),
            "weight_scale": scale,
            "weight_shape": TensorSpec("I64", (2,)),
        }
        if not self.symmetric:
            stored["weight_zero_point"] = TensorSpec("I32", (num_words(out_features, self.bits), num_groups))
        return stored

    def stored_bits(self, out_features: int, in_features: int, scale_bits: int = 16) -> int:
        """Bits that the weights, scales and zero points of one linear take, headers apart."""
        per_group = scale_bits + (0 if self.symmetric else self.bits)
        return out_features * (in_features * self.bits + self.num_groups(in_features) * per_group)

    def check_fits(self, module: str, in_features: int) -> None:
        """Raise RecipeError where the group size does not divide ``in_features``; name the legal sizes."""
        if self.group_size is None or in_features % self.group_size == 0:
            return
        legal = [str(g) for g in GROUP_SIZES if in_features % g == 0]
        raise RecipeError(
            f"quantize.scheme.group_size: {self.group_size} does not divide the {in_features} input features of "
            f"{module}; use {' or '.join([*legal, 'channel'])}"
        )

    def config_group(self, targets: list[str]) -> dict[str, Any]:
        """The entry of ``quantization_config.config_groups`` that declares this scheme."""
        group: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        weights = {**group, "symmetric": self.symmetric, "group_size": self.group_size}
        weights["strategy"] = "channel" if self.group_size is None else "group"
        activations = None
        if self.activation_bits is not None:
            activations = {**group, "num_bits": self.activation_bits, "strategy": "token", "dynamic": True}
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": activations,
            "output_activations": None,
            "format": self.format,
        }


def num_words(num_values: int, bits: int) -> int:
    """32-bit words that hold ``num_values`` packed without gaps."""
    return -(-num_values * bits // 32)


def weight_only(bits: int, group_size: int | None, symmetric: bool = True) -> WeightScheme:
    """3-, 4- or 8-bit weights with one scale per ``group_size`` inputs (None: per output channel)."""
    if bits not in WEIGHT_ONLY_BITS:
        raise ValueError(f"{bits} bits; allowed: {WEIGHT_ONLY_BITS}")
    return WeightScheme(f"w{bits}a16", bits, group_size, None, PACKED, symmetric)


def w4a16(group_size: int = 64) -> WeightScheme:
    """4-bit weights with one scale per ``group_size`` inputs; activations stay in floating point."""
    return weight_only(4, group_size)


def w8a8() -> WeightScheme:
    """8-bit weights with one scale per output channel; activations 8-bit per token, scaled at run time."""
    return WeightScheme("w8a8", 8, None, 8, UNPACKED)


def scheme_from_config_group(group: dict[str, Any]) -> WeightScheme:
    """The scheme that ``config_group`` declares; RecipeError where it is one this runtime does not execute."""
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    for scheme in _declarable(weights):
        declared = scheme.config_group([])
        if _says(weights, declared["weights"]) and _says(activations, declared["input_activations"]):
            return scheme
    raise RecipeError(
        f"quantization_config: weights {weights}, input_activations {activations} is not a scheme this runtime "
        "executes (known: integer weights of 3, 4 or 8 bits in groups or channels; 8-bit symmetric channels with "
        "dynamic 8-bit token activations)"
    )


def _declarable(weights: dict[str, Any]) -> list[WeightScheme]:
    """The schemes that a declaration may mean, by its bits and group size."""
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if bits not in WEIGHT_ONLY_BITS or not (isinstance(size, int) or size is None):
        return []
    group_size = None if weights.get("strategy") == "channel" else size
    candidates = [weight_only(bits, group_size, symmetric) for symmetric in (True, False)]
    return [*candidates, w8a8()]


def _says(found: dict[str, Any] | None, wanted: dict[str, Any] | None) -> bool:
    """Whether a declaration makes every statement of the wanted one; absent group sizes and dynamics are defaults."""
    if found is None or wanted is None:
        return not found and not wanted
    return all(
        found.get(key, False if key == "dynamic" else None) == value
        for key, value in wanted.items()
        if key != "group_size" or value is not None
    )
