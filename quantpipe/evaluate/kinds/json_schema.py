"""``json_schema``: the answer is JSON that a schema allows, and chosen fields of it are those of the target."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema_rs
from pydantic import PlainValidator, WithJsonSchema

from quantpipe.calibration.definition.mapping import Texts
from quantpipe.calibration.readers.values import ABSENT, lookup
from quantpipe.errors import DataError
from quantpipe.evaluate.kinds.kind import TARGET, Item, Kind, Response, Scored, TextKeys, written
from quantpipe.recipe.document import describe
from quantpipe.recipe.section import Count

_FENCED = re.compile(r"\A```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL)
_TEXT_OR_OBJECT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})


def _schema(value: Any) -> dict[str, Any] | str:
    if not isinstance(value, (str, dict)) or not value:
        raise ValueError(f"found {describe(value)}; allowed: a mapping, or the path of a JSON file")
    return value


class JsonSchemaKeys(TextKeys):
    """A task of the kind `json_schema`."""

    kind: Literal["json_schema"]
    """`json_schema`."""
    json_schema: Annotated[dict[str, Any] | str, PlainValidator(_schema), _TEXT_OR_OBJECT]
    """The schema, or the path of a JSON file with it, relative to the suite's file; it may refer to itself only."""
    fields: Texts = ()
    """Fields of the answer that must equal those of the target, an object; names with dots reach into objects. Absent:
    none, then no target is needed."""
    fenced: bool = True
    """Whether the answer may be a Markdown block: three backticks, or these with `json`, around it."""
    max_tokens: Count = 256
    """Most tokens of an answer."""
    stop: Texts | None = ()
    """Strings that end an answer. Absent: none."""

    def other_files(self) -> tuple[str, ...]:
        return (self.json_schema,) if isinstance(self.json_schema, str) else ()

    def item_fields(self) -> tuple[str, ...]:
        return (TARGET,) if self.fields else ()

    def shot_answer(self, target: Any) -> str:
        return json.dumps(_object(target), ensure_ascii=False)


@dataclass(frozen=True)
class JsonSchemaScorer:
    """Validates, then compares fields; the prediction is the JSON, keys in order."""

    keys: JsonSchemaKeys
    validator: Any

    def check(self, item: Item) -> None:
        if not self.keys.fields:
            return
        target = _object(item.target)
        for name in self.keys.fields:
            if lookup(target, name) is ABSENT:
                raise ValueError(f"the target has no field {name!r}")

    def score(self, item: Item, response: Response) -> Scored:
        try:
            found = json.loads(self._unfenced(written(response).strip()))
        except (ValueError, RecursionError):
            return Scored(0.0, "")
        prediction = json.dumps(found, ensure_ascii=False, sort_keys=True)
        if not self.validator.is_valid(found):
            return Scored(0.0, prediction)
        target = _object(item.target) if self.keys.fields else {}
        is_right = all(_field(found, name) == lookup(target, name) for name in self.keys.fields)
        return Scored(float(is_right), prediction)

    def _unfenced(self, text: str) -> str:
        match = _FENCED.match(text) if self.keys.fenced else None
        return match[1] if match else text


def _field(found: Any, name: str) -> Any:
    return lookup(found, name) if isinstance(found, dict) else ABSENT


def _object(target: Any) -> dict[str, Any]:
    """The target as an object: one of a JSON file, or one written as JSON in a column."""
    if isinstance(target, str):
        try:
            target = json.loads(target)
        except ValueError as error:
            raise ValueError(f"the target is not JSON: {error}") from None
    if not isinstance(target, dict):
        raise ValueError("the target is no JSON object")
    return target


def _open(keys: JsonSchemaKeys, folder: Path, place: Callable[[str], str]) -> JsonSchemaScorer:
    schema, where = keys.json_schema, place("json_schema")
    if isinstance(schema, str):
        try:
            schema = json.loads((folder / schema).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(f"{where}: {folder / str(schema)}: cannot be read as JSON: {reason}") from error
    try:
        return JsonSchemaScorer(keys, jsonschema_rs.validator_for(schema, retriever=_nothing_else))
    except (ValueError, TypeError) as error:
        reason = getattr(error, "message", None) or str(error).partition("\n")[0]
        raise DataError(f"{where}: not a JSON schema: {reason}; correct it") from error


def _nothing_else(uri: str) -> Any:
    raise ValueError(f"it refers to {uri}, and may only refer to itself")


KIND = Kind(JsonSchemaKeys, "text", "the answer is JSON of a schema, with the target's values in chosen fields", _open)
