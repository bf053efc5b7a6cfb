"""The rope of a config.json, whatever its kind and spelling, as frequencies and a scale.

Frequencies are computed in float32 and in the order that checkpoints were trained with, so that long contexts agree to
the last bit.

Shapes: P pairs of dimensions that turn.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from quantpipe.errors import ArtifactError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.models.config_fields import positive_number, require_value, required_int
from quantpipe.models.description import RopeSpec

DEFAULT_ROPE_THETA = 10000.0
# Where the YaRN paper begins and ends to stretch: waves that turn so often within the original context.
YARN_FAST_TURNS, YARN_SLOW_TURNS = 32.0, 1.0
# What is read of a rope, and ``finetuned``, which says only how a checkpoint was made.
_KNOWN_FIELDS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    *("mscale", "mscale_all_dim", "short_factor", "long_factor", "finetuned"),
}


@dataclass(frozen=True)
class RopeFields:
    """What a kind of rope is computed from. ``original_positions`` is the context before it was extended."""

    parameters: Mapping[str, Any]
    theta: float
    num_dims: int
    max_positions: int
    original_positions: int

    @property
    def exponents_P(self) -> Tensor:
        return torch.arange(0, self.num_dims, 2).float() / self.num_dims

    @property
    def frequencies_P(self) -> Tensor:
        return 1.0 / self.theta**self.exponents_P

    def number(self, key: str, default: float | None = None) -> float:
        """KeyError where the field is not a number above zero (or absent, without a default)."""
        value = self.parameters.get(key)
        if value is None and default is not None:
            return default
        if not _is_positive(value):
            raise KeyError(key)
        return float(value)

    def numbers(self, key: str) -> Tensor:
        """[P]."""
        values = self.parameters.get(key)
        if not isinstance(values, list) or len(values) != self.num_dims // 2 or not all(map(_is_positive, values)):
            raise KeyError(key)
        return torch.tensor(values, dtype=torch.float32)

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


def rope_spec(
    artifact: Artifact, parameters: Mapping[str, Any], head_dim: int, may_be_partial: bool = False
) -> RopeSpec:
    """The rope that ``parameters`` of a config.json declare. ArtifactError where it is none that is known."""
    where = f"{artifact.folder}/config.json"
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_KINDS:
        raise ArtifactError(f"{where}: unknown rope_type '{rope_type}'{suggest(str(rope_type), ROPE_KINDS)}")
    for unknown in sorted(parameters.keys() - _KNOWN_FIELDS):
        raise ArtifactError(f"{where}: unknown rope field '{unknown}'{suggest(unknown, _KNOWN_FIELDS)}")
    fields = _fields(artifact, parameters, head_dim, may_be_partial)
    try:
        return ROPE_KINDS[rope_type](fields)
    except ArithmeticError as error:
        raise ArtifactError(f"{where}: rope_type '{rope_type}' cannot be computed from its numbers: {error}") from error
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{where}: rope_type '{rope_type}' lacks a legal {error}; give the number") from error


def _fields(artifact: Artifact, parameters: Mapping[str, Any], head_dim: int, may_be_partial: bool) -> RopeFields:
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


def _spec(frequencies_P: Tensor, attention_scale: float = 1.0, max_positions: int | None = None) -> RopeSpec:
    return RopeSpec(tuple(frequencies_P.tolist()), attention_scale, max_positions)


def _default_rope(fields: RopeFields) -> RopeSpec:
    return _spec(fields.frequencies_P)


def _linear_rope(fields: RopeFields) -> RopeSpec:
    return _spec(fields.frequencies_P / fields.number("factor"))


def _dynamic_rope(fields: RopeFields) -> RopeSpec:
    """Its base grows with the text, from the model's own limit on: up to there it is the default rope."""
    if fields.original_positions != fields.max_positions:
        raise KeyError("original_max_position_embeddings")
    factor, length = fields.number("factor"), fields.max_positions
    base = fields.theta * (factor * length / length - (factor - 1)) ** (fields.num_dims / (fields.num_dims - 2))
    return _spec(1.0 / base**fields.exponents_P, max_positions=fields.max_positions)


def _llama3_rope(fields: RopeFields) -> RopeSpec:
    """Long waves are stretched by ``factor``, short ones kept, those between blended (Llama 3.1)."""
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise KeyError("high_freq_factor")
    frequencies_P = fields.frequencies_P
    turns_P = fields.original_positions / (2 * math.pi / frequencies_P)
    kept_frac_P = ((turns_P - low) / (high - low)).clamp(0, 1)
    return _spec((1 - kept_frac_P) * frequencies_P / fields.number("factor") + kept_frac_P * frequencies_P)


def _yarn_rope(fields: RopeFields) -> RopeSpec:
    """As Llama 3, but blended by pair number, and attention is sharpened (Peng et al. 2023, YaRN, sections 3.2-3.4)."""
    low, high = (_yarn_pair(fields, turns) for turns in _yarn_turns(fields))
    if fields.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, fields.num_dims - 1)
    ramp_P = torch.arange(fields.num_dims // 2).float() - low
    kept_frac_P = 1 - (ramp_P / (high - low if high != low else 0.001)).clamp(0, 1)
    waves_P = fields.theta**fields.exponents_P
    stretched_P = 1.0 / (fields.factor * waves_P)
    return _spec(stretched_P * (1 - kept_frac_P) + 1.0 / waves_P * kept_frac_P, _yarn_attention_scale(fields))


def _yarn_turns(fields: RopeFields) -> tuple[float, float]:
    return fields.number("beta_fast", YARN_FAST_TURNS), fields.number("beta_slow", YARN_SLOW_TURNS)


def _yarn_pair(fields: RopeFields, turns: float) -> float:
    """The pair, as a fraction, that turns so often within the original context."""
    return (fields.num_dims * math.log(fields.original_positions / (turns * 2 * math.pi))) / (
        2 * math.log(fields.theta)
    )


def _yarn_attention_scale(fields: RopeFields) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(fields.factor) + 1.0 if fields.factor > 1 else 1.0

    weights = [fields.number(key) for key in ("mscale", "mscale_all_dim") if fields.parameters.get(key)]
    usual = scale(weights[0]) / scale(weights[1]) if len(weights) == 2 else scale(1)
    return fields.number("attention_factor", usual)


def _long_rope(fields: RopeFields) -> RopeSpec:
    """Two sets of frequencies (Ding et al. 2024, LongRoPE): one within the original context, another for every position
    once a text grows beyond it. Cached keys cannot be turned again, so only the former is served."""
    short_P, long_P = fields.numbers("short_factor"), fields.numbers("long_factor")
    stretch = 1.0
    if fields.factor > 1:
        stretch = math.sqrt(1 + math.log(fields.factor) / math.log(fields.original_positions))
    max_positions = None if torch.equal(short_P, long_P) else fields.original_positions
    frequencies_P = 1.0 / (short_P * fields.theta**fields.exponents_P)
    return _spec(frequencies_P, fields.number("attention_factor", stretch), max_positions)


ROPE_KINDS: dict[str, Callable[[RopeFields], RopeSpec]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "dynamic": _dynamic_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _long_rope,
}
