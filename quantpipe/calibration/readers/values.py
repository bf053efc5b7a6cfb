"""One value of a row: where it is, and what kind it is in words. Knows no files."""

from collections.abc import Mapping
from typing import Any

ABSENT = object()


def lookup(values: Mapping[str, Any], name: str) -> Any:
    """What the field ``name`` holds, reaching into objects where the name has dots; ``ABSENT`` where there is none."""
    if name in values:
        return values[name]
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return ABSENT
        found = found[part]
    return found


def kind_of(value: Any) -> str:
    """What a value is, in words that do not show it."""
    if value is None:
        return "empty (null)"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    if isinstance(value, Mapping):
        return "an object"
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", bytes: "binary data"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")
