"""The rope of a config.json, whatever its kind, as frequencies and a scale.

Frequencies are computed in float32 and in the order that checkpoints were trained with, so that long contexts agree to
the last bit.

Shapes: P pairs of dimensions that turn.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quantpipe.errors import ArtifactError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.models.description import RopeSpec
from quantpipe.models.rope_fields import RopeFields, most_positions, read_fields, rope_type_of

# Where the YaRN paper begins and ends to stretch: waves that turn so often within the original context.
YARN_FAST_TURNS, YARN_SLOW_TURNS = 32.0, 1.0


def rope_spec(
    artifact: Artifact, parameters: Mapping[str, Any], head_dim: int, may_be_partial: bool = False
) -> RopeSpec:
    """The rope that ``parameters`` of a config.json declare. ArtifactError where it is none that is known."""
    where = f"{artifact.folder}/config.json"
    rope_type = rope_type_of(parameters)
    if rope_type not in ROPE_KINDS:
        raise ArtifactError(f"{where}: unknown rope_type '{rope_type}'{suggest(rope_type, ROPE_KINDS)}")
    fields = read_fields(artifact, parameters, head_dim, may_be_partial)
    try:
        return ROPE_KINDS[rope_type](fields)
    except ArithmeticError as error:
        raise ArtifactError(f"{where}: rope_type '{rope_type}' cannot be computed from its numbers: {error}") from error
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{where}: rope_type '{rope_type}' lacks a legal {error}; give the number") from error


def _exponents(fields: RopeFields) -> Tensor:
    return torch.arange(0, fields.num_dims, 2).float() / fields.num_dims


def _frequencies(fields: RopeFields) -> Tensor:
    return 1.0 / fields.theta ** _exponents(fields)


def _spec(frequencies_P: Tensor, attention_scale: float = 1.0, max_positions: int | None = None) -> RopeSpec:
    return RopeSpec(tuple(frequencies_P.tolist()), attention_scale, max_positions)


def _default_rope(fields: RopeFields) -> RopeSpec:
    return _spec(_frequencies(fields))


def _linear_rope(fields: RopeFields) -> RopeSpec:
    return _spec(_frequencies(fields) / fields.number("factor"))


def _dynamic_rope(fields: RopeFields) -> RopeSpec:
    """Its base grows with the text, from the model's own limit on: up to there it is the default rope."""
    if fields.original_positions != fields.max_positions:
        raise KeyError("original_max_position_embeddings")
    factor, length = fields.number("factor"), fields.max_positions
    base = fields.theta * (factor * length / length - (factor - 1)) ** (fields.num_dims / (fields.num_dims - 2))
    return _spec(1.0 / base ** _exponents(fields), max_positions=most_positions("dynamic", fields))


def _llama3_rope(fields: RopeFields) -> RopeSpec:
    """Long waves are stretched by ``factor``, short ones kept, those between blended (Llama 3.1)."""
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise KeyError("high_freq_factor")
    frequencies_P = _frequencies(fields)
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
    waves_P = fields.theta ** _exponents(fields)
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
    short_P = torch.tensor(fields.numbers("short_factor"), dtype=torch.float32)
    fields.numbers("long_factor")  # what it holds is not served, yet must be legal
    stretch = 1.0
    if fields.factor > 1:
        stretch = math.sqrt(1 + math.log(fields.factor) / math.log(fields.original_positions))
    max_positions = most_positions("longrope", fields)
    frequencies_P = 1.0 / (short_P * fields.theta ** _exponents(fields))
    return _spec(frequencies_P, fields.number("attention_factor", stretch), max_positions)


ROPE_KINDS: dict[str, Callable[[RopeFields], RopeSpec]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "dynamic": _dynamic_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
    "longrope": _long_rope,
}
