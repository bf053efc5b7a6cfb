"""Reads fields of a config.json: required ones, the two spellings of rope, and the stop tokens.

A field this runtime cannot honour is an ArtifactError that names it; nothing is ignored.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantpipe.errors import ArtifactError, suggest
from quantpipe.formats.artifact import Artifact
from quantpipe.models.description import RopeSpec

DEFAULT_ROPE_THETA = 10000.0


def required_int(artifact: Artifact, key: str) -> int:
    """A positive whole number that config.json must hold."""
    value = artifact.config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArtifactError(f"{artifact.folder}/config.json: {key}: {value!r} is not a positive whole number")
    return value


def require_value(artifact: Artifact, key: str, found: object, supported: object) -> None:
    """Refuse a field whose value this runtime does not execute."""
    if found != supported:
        raise ArtifactError(
            f"{artifact.folder}/config.json: {key} {found!r} is not supported by this runtime (known: {supported!r})"
        )


def rope_spec(artifact: Artifact, head_dim: int) -> RopeSpec:
    """The rope of a config.json: ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` as written before."""
    config = artifact.config
    parameters = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", DEFAULT_ROPE_THETA),
        **(config.get("rope_scaling") or {}),
    }
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ArtifactError(
            f"{artifact.folder}/config.json: unknown rope_type '{rope_type}'{suggest(str(rope_type), ROPE_TYPES)}"
        )
    for source in (config, parameters):
        require_value(artifact, "partial_rotary_factor", source.get("partial_rotary_factor", 1.0), 1.0)
    theta = parameters.get("rope_theta", config.get("rope_theta", DEFAULT_ROPE_THETA))
    # Computed in float32 in the order that checkpoints were trained with, so that long contexts agree to the last bit.
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    try:
        frequencies = ROPE_TYPES[rope_type](1.0 / theta**exponents, parameters)
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"{artifact.folder}/config.json: rope_type '{rope_type}' lacks a legal {error}; give the number"
        ) from error
    return RopeSpec(tuple(frequencies.tolist()))


def _default_rope(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    return frequencies


def _linear_rope(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    return frequencies / float(parameters["factor"])


def _llama3_rope(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended (Llama 3.1)."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = float(parameters["original_max_position_embeddings"]) / (2 * math.pi / frequencies)
    kept_frac = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_frac) * frequencies / float(parameters["factor"]) + kept_frac * frequencies


ROPE_TYPES: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    "default": _default_rope,
    "linear": _linear_rope,
    "llama3": _llama3_rope,
}


def eos_token_ids(artifact: Artifact) -> tuple[int, ...]:
    """Stop tokens named by config.json and by generation_config.json, without repeats."""
    found: list[int] = []
    for config in (artifact.config, _generation_config(artifact)):
        value = config.get("eos_token_id")
        found += [] if value is None else value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(found))


def _generation_config(artifact: Artifact) -> dict[str, Any]:
    path = artifact.folder / "generation_config.json"
    if not path.exists():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ArtifactError(f"{path}: holds a JSON {type(loaded).__name__}; an object is expected")
    return loaded
