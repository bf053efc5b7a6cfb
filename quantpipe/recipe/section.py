"""What every part of a recipe is built from: the strict frozen base, and the types of single values."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _legal_pattern(pattern: str) -> str:
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        if pattern.startswith("re:"):
            raise ValueError(f"found {pattern!r}, not a regular expression: {error}; correct it") from error
    if pattern in ("", "re:"):
        raise ValueError(f"found {pattern!r}; allowed: a module name, or 're:' and a regular expression")
    return pattern


Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Pattern = Annotated[str, AfterValidator(_legal_pattern)]


class Section(BaseModel):
    """What every part of a recipe has in common.

    ``set_elsewhere``: names that a reader may look for here, and where what they mean is set.
    """

    set_elsewhere: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def or_text(schema: dict[str, Any]) -> None:
    """JSON schema of a value that may be given as text, the short form of a mapping."""
    described: dict[str, Any] = {key: schema.pop(key) for key in ("description", "title") if key in schema}
    long_form = dict(schema)
    schema.clear()
    schema |= {**described, "anyOf": [{"type": "string"}, long_form]}
