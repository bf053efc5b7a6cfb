"""Reads fields of a config.json: numbers, flags that must have one value, and the stop tokens.

A field this runtime cannot honour is an ArtifactError that names it; nothing is ignored.
"""

import json
from typing import Any

from quantpipe.errors import ArtifactError, UnservedError
from quantpipe.formats.artifact import Artifact


def required_int(artifact: Artifact, key: str) -> int:
    """A positive whole number that config.json must hold."""
    value = artifact.config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArtifactError(f"{artifact.folder}/config.json: {key}: {value!r} is not a positive whole number")
    return value


def optional_int(artifact: Artifact, key: str, default: int | None) -> int | None:
    """A positive whole number or null; ``default`` where config.json leaves it out."""
    if artifact.config.get(key, default) is None:
        return None
    return required_int(artifact, key) if key in artifact.config else default


def positive_number(artifact: Artifact, key: str, default: float) -> float:
    """A number above zero; ``default`` where config.json leaves it out."""
    value = artifact.config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ArtifactError(f"{artifact.folder}/config.json: {key}: {value!r} is not a number above 0")
    return value


def require_value(artifact: Artifact, key: str, found: object, supported: object) -> None:
    """Raise UnservedError for a field whose value this runtime does not execute."""
    if found != supported:
        raise UnservedError(
            f"{artifact.folder}/config.json: {key} {found!r} is not supported by this runtime (known: {supported!r})"
        )


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
