"""Reads fields of a config.json: numbers, flags that must have one value, and the stop tokens.

A field this runtime cannot honour is an ArtifactError that names it; nothing is ignored.
"""

import json
from pathlib import Path
from typing import Any

from quantpipe.errors import ArtifactError, UnservedError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.config_kinds import check_kinds, is_positive, is_size, shown

ANOTHER_RUNTIME = "serve it with another runtime, such as vLLM"


def required_int(artifact: Artifact, key: str) -> int:
    """A positive whole number that config.json must hold."""
    value = artifact.config.get(key)
    if not is_size(value):
        found = "it is missing" if key not in artifact.config else f"{shown(value)} is not a positive whole number"
        raise ArtifactError(f"{artifact.folder}/config.json: {key}: {found}")
    return value


def optional_int(artifact: Artifact, key: str, default: int | None) -> int | None:
    """A positive whole number or null; ``default`` where config.json leaves it out."""
    if artifact.config.get(key, default) is None:
        return None
    return required_int(artifact, key) if key in artifact.config else default


def positive_number(artifact: Artifact, key: str, default: float) -> float:
    """A number above zero; ``default`` where config.json leaves it out."""
    value: float = artifact.config.get(key, default)
    if not is_positive(value):
        raise ArtifactError(f"{artifact.folder}/config.json: {key}: {shown(value)} is not a number above 0")
    return value


def require_value(artifact: Artifact, key: str, found: object, supported: object) -> None:
    """Raise UnservedError for a field whose value this runtime does not execute."""
    if found != supported:
        raise UnservedError(
            f"{artifact.folder}/config.json: {key} {shown(found)} is not supported by this runtime (known: "
            f"{supported!r}); {ANOTHER_RUNTIME}"
        )


def eos_token_ids(artifact: Artifact) -> tuple[int, ...]:
    """Stop tokens named by config.json and by generation_config.json, without repeats."""
    found: list[int] = []
    path = artifact.folder / "generation_config.json"
    generation = _generation_config(path)
    check_kinds(path, generation)
    for config in (artifact.config, generation):
        value = config.get("eos_token_id")
        found += [] if value is None else value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(found))


def _generation_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ArtifactError(f"{path}: holds a JSON {type(loaded).__name__}; an object is expected")
    return loaded
