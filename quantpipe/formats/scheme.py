"""Which tensors a quantized linear stores, and how it is declared to readers. Knows no tensor values.

``WeightScheme.tensors`` is the only list of what a layer stores: packer, verifier, loader and planner all read it.

Shapes: N out_features, K in_features, G groups along K (1 for a scale per output channel).
Source: the compressed-tensors format, ``pack-quantized`` and ``int-quantized``.
"""

from dataclasses import dataclass
from typing import Any

from quantpipe.errors import RecipeError

GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor: safetensors dtype name (``I32``, ``BF16`` ...) and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightScheme:
    """How one linear's weight (and the activations it reads) are represented.

    ``group_size`` None means one scale per output channel. ``activation_bits`` 8 means that inputs are
    quantized per token at run time, symmetric; None means they stay in floating point.
    """

    name: str
    bits: int
    group_size: int | None
    activation_bits: int | None
    format: str

    @property
    def q_min(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def q_max(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def is_packed(self) -> bool:
        """Whether several weights share one stored 32-bit word."""
        return self.format == "pack-quantized"

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size is None else in_features // self.group_size

    def tensors(self, out_features: int, in_features: int, scale_dtype: str) -> dict[str, TensorSpec]:
        """Suffix -> spec of everything stored for one linear of shape [N, K], bias apart."""
        scale = TensorSpec(scale_dtype, (out_features, self.num_groups(in_features)))
        if not self.is_packed:
            return {"weight": TensorSpec("I8", (out_features, in_features)), "weight_scale": scale}
        words = -(-in_features * self.bits // 32)
        return {
            "weight_packed": TensorSpec("I32", (out_features, words)),
            "weight_scale": scale,
            "weight_shape": TensorSpec("I64", (2,)),
        }

    def check_fits(self, module: str, in_features: int) -> None:
        """Raise RecipeError where the group size does not divide ``in_features``; name the legal sizes."""
        if self.group_size is None or in_features % self.group_size == 0:
            return
        legal = [str(g) for g in GROUP_SIZES if in_features % g == 0]
        raise RecipeError(
            f"quantize.scheme.group_size: {self.group_size} does not divide the {in_features} input features of "
            f"{module}; use {' or '.join(legal) if legal else 'scheme w8a8, which needs no groups'}"
        )

    def config_group(self, targets: list[str]) -> dict[str, Any]:
        """The entry of ``quantization_config.config_groups`` that declares this scheme."""
        group: dict[str, Any] = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        if self.group_size is None:
            weights = {**group, "strategy": "channel", "group_size": None}
        else:
            weights = {**group, "strategy": "group", "group_size": self.group_size}
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


def w4a16(group_size: int = 64) -> WeightScheme:
    """4-bit weights with one scale per ``group_size`` inputs; activations stay in floating point."""
    return WeightScheme("w4a16", 4, group_size, None, "pack-quantized")


def w8a8() -> WeightScheme:
    """8-bit weights with one scale per output channel; activations 8-bit per token, scaled at run time."""
    return WeightScheme("w8a8", 8, None, 8, "int-quantized")


def scheme_from_config_group(group: dict[str, Any]) -> WeightScheme:
    """The scheme that ``config_group`` declares; RecipeError where it is one this runtime does not execute."""
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    if weights.get("type") == "int" and weights.get("symmetric") is True:
        if bits == 4 and strategy == "group" and activations is None and isinstance(size, int):
            return w4a16(size)
        dynamic_int8 = activations is not None and (
            activations.get("num_bits") == 8
            and activations.get("type") == "int"
            and activations.get("symmetric") is True
            and activations.get("strategy") == "token"
            and activations.get("dynamic") is True
        )
        if bits == 8 and strategy == "channel" and dynamic_int8:
            return w8a8()
    raise RecipeError(
        f"quantization_config: weights {weights}, input_activations {activations} is not a scheme this runtime "
        "executes (known: 4-bit symmetric groups; 8-bit symmetric channels with dynamic 8-bit token activations)"
    )
