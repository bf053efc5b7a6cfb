"""What a config.json says of its rope, whatever the spelling, before any frequency is computed. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from quantpipe.errors import ArtifactError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import positive_number, require_value, required_int
from quantpipe.models.description import RopeSpec

DEFAULT_ROPE_THETA = 10000.0
# What is read of a rope, and ``finetuned``, which says only how a checkpoint was made.
_KNOWN_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor", "finetuned"),
}


class RopeReader(Protocol):
    """Makes a rope of what a config.json declares: ``rope_spec``, or ``rope_limit`` where only sizes matter."""

    def __call__(
        self, artifact: Artifact, parameters: Mapping[str, Any], head_dim: int, may_be_partial: bool = False
    ) -> RopeSpec: ...


@dataclass(frozen=True)
class RopeFields:
    """What a kind of rope is computed from. ``original_positions`` is the context before it was extended."""

    parameters: Mapping[str, Any]
    theta: float
    num_dims: int
    max_positions: int
    original_positions: int

    def number(self, key: str, default: float | None = None) -> float:
        """KeyError where the field is not a number above zero (or absent, without a default)."""
        value = self.parameters.get(key)
        if value is None and default is not None:
            return default
        if not _is_positive(value):
            raise KeyError(key)
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """[P]. KeyError where they are not as many as there are pairs."""
        values = self.parameters.get(key)
        if not isinstance(values, list) or len(values) != self.num_dims // 2 or not all(map(_is_positive, values)):
            raise KeyError(key)
        return values

    @property
    def factor(self) -> float:
        """By how much the context was extended; where a config leaves it out, what its two lengths say."""
        return self.number("factor", self.max_positions / self.original_positions)


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` as written before."""
    return config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", DEFAULT_ROPE_THETA),
        **(config.get("rope_scaling") or {}),
    }


def rope_type_of(parameters: Mapping[str, Any]) -> str:
    """The kind of rope, in either spelling."""
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def rope_limit(
    artifact: Artifact, parameters: Mapping[str, Any], head_dim: int, may_be_partial: bool = False
) -> RopeSpec:
    """A rope without its frequencies: how far it holds is all that it says. ArtifactError as for a whole one."""
    fields = read_fields(artifact, parameters, head_dim, may_be_partial)
    return RopeSpec((), max_positions=most_positions(rope_type_of(parameters), fields))


def most_positions(rope_type: str, fields: RopeFields) -> int | None:
    """Where a rope would turn sooner positions otherwise once a text grows beyond; None: nowhere."""
    if rope_type == "dynamic":
        return fields.max_positions
    if rope_type == "longrope" and fields.parameters.get("short_factor") != fields.parameters.get("long_factor"):
        return fields.original_positions
    return None


def read_fields(
    artifact: Artifact, parameters: Mapping[str, Any], head_dim: int, may_be_partial: bool = False
) -> RopeFields:
    """What the rope that ``parameters`` declare is computed from. ArtifactError where a field cannot be."""
    where = f"{artifact.folder}/config.json"
    for unknown in sorted(parameters.keys() - _KNOWN_FIELDS):
        raise ArtifactError(f"{where}: unknown rope field '{unknown}'{suggest(unknown, _KNOWN_FIELDS)}")
    config = artifact.config
    turned_frac = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if not may_be_partial:
        require_value(artifact, "partial_rotary_factor", turned_frac, 1.0)
    num_dims = int(head_dim * turned_frac) if _is_positive(turned_frac) else 0
    if num_dims % 2 or not 0 < num_dims <= head_dim:
        raise ArtifactError(
            f"{artifact.folder}/config.json: partial_rotary_factor {turned_frac} turns {num_dims} of {head_dim} "
            "dimensions; an even number of them is needed"
        )
    max_positions = required_int(artifact, "max_position_embeddings")
    original_key = "original_max_position_embeddings"
    original = config.get(original_key, parameters.get(original_key))
    original = max_positions if original is None else original
    theta = parameters.get("rope_theta", positive_number(artifact, "rope_theta", DEFAULT_ROPE_THETA))
    for key, value in (("rope_theta", theta), (original_key, original)):
        if not _is_positive(value):
            raise ArtifactError(f"{artifact.folder}/config.json: {key}: {value!r} is not a number above 0")
    return RopeFields(parameters, theta, num_dims, max_positions, original)
