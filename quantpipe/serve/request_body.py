"""What all request bodies have in common: which of their fields are read, refused, or ignored by name."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from quantpipe.serve.fields import only_neutral, shown_name

MAX_NAMED = 32  # ignored fields that a response header names


class RequestBody(BaseModel):
    """A JSON object of known fields. Others are ignored, as servers of this API do, and kept by name in ``ignored``.

    ``HARMLESS`` fields never change the output, and are not worth a word. ``NEUTRAL`` fields are not served, and taken
    only at the values that ask for nothing. A field of ``elsewhere`` is an error.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, json_schema_extra={"additionalProperties": True}
    )

    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def elsewhere(cls) -> frozenset[str]:
        """Fields that only another endpoint has, where they would change the output."""
        return frozenset()

    @model_validator(mode="wrap")
    @classmethod
    def _set_aside_what_is_not_served(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, dict):
            return handler(values)
        asked = {name: value for name, value in values.items() if name not in cls.HARMLESS}
        asked = only_neutral(asked, cls.NEUTRAL)
        unknown = asked.keys() - cls.model_fields.keys()
        for name in sorted(unknown & cls.elsewhere()):
            raise PydanticCustomError(
                "other_endpoint", "{param} is no field of this endpoint; leave it out", {"param": name}
            )
        body = handler({name: value for name, value in asked.items() if name not in unknown})
        body._ignored = tuple(sorted(map(shown_name, unknown)))
        return body

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the fields that mean nothing here, fit to be quoted."""
        return self._ignored

    @property
    def headers(self) -> dict[str, str]:
        """What a response says of this body: ``quantpipe-ignored`` names what was ignored, percent-encoded."""
        if not self._ignored:
            return {}
        return {"quantpipe-ignored": ", ".join(map(quote, self._ignored[:MAX_NAMED]))}
