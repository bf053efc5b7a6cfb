"""Samples from a JSON Lines file, one row at a time: memory does not grow with the file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantpipe.calibration.definition import Fields, JsonlSource
from quantpipe.calibration.samples import Message, RowProblems, Sample
from quantpipe.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
_UTF8_BOM = b"\xef\xbb\xbf"


class _RowError(Exception):
    """Why one row is no sample."""


def read_jsonl(source: JsonlSource, folder: Path, problems: RowProblems) -> Iterator[Sample]:
    """Yield the file's samples; add rows that are none to ``problems``. Raises DataError where it cannot be read."""
    file = folder / source.path
    try:
        with file.open("rb") as rows:
            for number, row in enumerate(rows, start=1):
                where = f"{file}:{number}"
                try:
                    yield Sample(where, _content(_parse(row.removeprefix(_UTF8_BOM) if number == 1 else row), source))
                except _RowError as error:
                    problems.add(where, str(error))
    except OSError as error:
        raise DataError(f"{file}: {(error.strerror or str(error)).lower()}; correct the path in set.yaml") from error


def _parse(row: bytes) -> dict[str, Any]:
    try:
        text = row.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise _RowError(f"byte {error.start + 1} of the row is not UTF-8; convert the file to UTF-8") from error
    if not text.strip():
        raise _RowError("the row is empty; remove it")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise _RowError(f"not valid JSON at column {error.colno}: {error.msg.lower()}; one object per row") from error
    except RecursionError as error:
        raise _RowError("nested too deeply; one flat object per row") from error
    if not isinstance(value, dict):
        raise _RowError(f"found {_kind(value)}; each row is an object with the fields that set.yaml names")
    return value


def _content(row: dict[str, Any], source: JsonlSource) -> str | tuple[Message, ...]:
    fields = source.fields
    if fields.text is not None:
        return _text(row, fields.text)
    if fields.messages is not None:
        return _messages(row, fields.messages, fields)
    assert fields.prompt is not None  # the definition allows no fourth form
    assert fields.response is not None
    prompt, response = _text(row, fields.prompt), _text(row, fields.response)
    if not source.uses_template:
        return f"{prompt}\n{response}"
    return {"role": "user", "content": prompt}, {"role": "assistant", "content": response}


def _messages(row: dict[str, Any], name: str, fields: Fields) -> tuple[Message, ...]:
    found = _field(row, name)
    if not isinstance(found, list) or not found:
        raise _RowError(f"field {name!r} is {_kind(found)}; it must be a list of messages")
    messages = []
    for index, message in enumerate(found):
        if not isinstance(message, dict):
            raise _RowError(f"{name}[{index}] is {_kind(message)}; it must be an object with a role and a content")
        try:
            role, content = _text(message, fields.role), _text(message, fields.content)
        except _RowError as error:
            raise _RowError(f"{name}[{index}]: {error}") from error
        if role not in ROLES:
            raise _RowError(f"{name}[{index}]: unknown role; allowed: {', '.join(ROLES)}")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise _RowError(f"no field {name!r}; there are: {', '.join(sorted(row)) or 'none'}")
    return row[name]


def _text(row: dict[str, Any], name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise _RowError(f"field {name!r} is {_kind(value)}; it must be text")
    if not value.strip():
        raise _RowError(f"field {name!r} is empty; fill it or remove the row")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _RowError(f"field {name!r} holds half of a surrogate pair; escape the character as two \\u codes")
    return value


def _kind(value: Any) -> str:
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "empty (null)" if value is None else kinds[type(value)] if value != [] else "an empty list"
