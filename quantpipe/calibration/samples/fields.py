"""From a row to a sample, as the source's mapping says. Knows no file formats and no tokens.

Names of fields may reach into objects with dots, where no field has the whole name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quantpipe.calibration.definition.mapping import ROLES, Fields, Label, canonical
from quantpipe.calibration.definition.sources import DatasetSource, FileSource
from quantpipe.calibration.readers.field_names import shown_names
from quantpipe.calibration.readers.values import ABSENT, kind_of, lookup
from quantpipe.calibration.rows import EMPTY_FIELD, NO_FIELD, NO_TEXT, Message, Row, RowError, Sample

_SURROGATE = re.compile("[\ud800-\udfff]")
NO_MESSAGES = "not a list of messages"
# Kinds of content parts that an error may name: another is the customer's own word.
OTHER_PARTS = (
    "image_url",
    "image",
    "input_image",
    "input_audio",
    "audio",
    "video",
    "file",
    "refusal",
    "tool_use",
    "tool_result",
    "thinking",
)


def to_sample(row: Row, source: FileSource | DatasetSource, index: int = 0) -> Sample:
    """The sample that ``row`` of the source with this index is. Raises RowError where it is none."""
    values, language, domain = row.values, source.language, source.domain
    return Sample(
        where=row.where,
        content=_content(values, source),
        source=index,
        group=None if source.group is None else _single(values, source.group),
        language=(language and _label(values, language)) or source.known_language,
        domain=(domain and _label(values, domain)) or source.known_domain,
    )


def _content(values: Mapping[str, Any], source: FileSource | DatasetSource) -> str | tuple[Message, ...]:
    fields = source.fields
    if fields.text is not None:
        return _text(values, fields.text)
    if fields.messages is not None:
        return _messages(values, fields.messages, fields)
    assert fields.prompt is not None  # the definition allows no fourth form
    assert fields.response is not None
    system = _joined(values, fields.system) if fields.system is not None else ""
    prompt, response = _text(values, fields.prompt), _text(values, fields.response)
    if source.template == "none":
        return "\n".join(part for part in (system, prompt, response) if part)
    opening: tuple[Message, ...] = ({"role": "system", "content": system},) if system else ()
    return (*opening, {"role": "user", "content": prompt}, {"role": "assistant", "content": response})


def _messages(values: Mapping[str, Any], name: str, fields: Fields) -> tuple[Message, ...]:
    found = _listed(lookup(values, name), name)
    if found is ABSENT:
        raise RowError(_absent(values, name), NO_FIELD)
    if not isinstance(found, (list, tuple)) or not found:
        text = f"field {name!r} is {kind_of(found)}; it must be a list of messages"
        raise RowError(text, EMPTY_FIELD if found is None or found == [] else NO_MESSAGES)
    return tuple(_message(message, f"{name}[{index}]", fields) for index, message in enumerate(found))


def _listed(found: Any, name: str) -> Any:
    """What a field with messages holds, which exports of tables write as JSON."""
    if not isinstance(found, str):
        return found
    try:
        value = json.loads(found)
    except (ValueError, RecursionError):  # whose words would quote the row
        text = f"field {name!r} is text that is not JSON; it must be a list of messages, or one written as JSON"
        raise RowError(text, NO_MESSAGES) from None
    if not isinstance(value, list):
        text = f"field {name!r} is {kind_of(value)} written as JSON; it must be a list of messages"
        raise RowError(text, NO_MESSAGES)
    return value


def _message(message: Any, where: str, fields: Fields) -> Message:
    if not isinstance(message, Mapping):
        text = f"{where} is {kind_of(message)}; it must be an object with a role and a content"
        raise RowError(text, NO_MESSAGES)
    try:
        role, content = _text(message, (fields.role,)), _text(message, (fields.content,))
    except RowError as error:
        missing = next((key for key in ("role", "content") if lookup(message, getattr(fields, key)) is ABSENT), None)
        advice = "" if missing is None else f"; fields.{missing} names the key that holds it"
        raise RowError(f"{where}: {error}{advice}", error.reason) from None
    role = fields.roles.get(role.strip(), role.strip())
    if role not in ROLES:
        known = ", ".join(dict.fromkeys((*ROLES, *fields.roles)))
        text = f"{where}: unknown role; allowed: {known}; fields.roles says what others mean"
        raise RowError(text, "unknown role")
    return {"role": role, "content": content}


def _text(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """The texts of the fields joined by a blank line. Raises RowError where all are empty."""
    text = _joined(values, names)
    if not text.strip():
        shown = repr(names[0]) if len(names) == 1 else " and ".join(map(repr, names))
        are = f"field {shown} is" if len(names) == 1 else f"fields {shown} are"
        raise RowError(f"{are} empty; fill it, or leave such rows out with bad_rows: drop", EMPTY_FIELD)
    return text


def _joined(values: Mapping[str, Any], names: Sequence[str]) -> str:
    if len(names) == 1:
        return _one(values, names[0])
    return "\n\n".join(text for name in names if (text := _one(values, name)).strip())


def _one(values: Mapping[str, Any], name: str) -> str:
    """The text of one field; a list of texts is joined by line breaks, none is empty."""
    found = values.get(name, ABSENT)
    if found is ABSENT:
        found = lookup(values, name)
        if found is ABSENT:
            raise RowError(_absent(values, name), NO_FIELD)
    if found is None:
        return ""
    if isinstance(found, (list, tuple)):
        found = "\n".join(_part(part, name) for part in found)
    if not isinstance(found, str):
        raise RowError(f"field {name!r} is {kind_of(found)}; it must be text", NO_TEXT)
    if "\0" in found:
        raise RowError(
            f"field {name!r} holds a NUL character; remove it, or correct the file's encoding", "NUL character"
        )
    if not found.isascii() and _SURROGATE.search(found):
        text = f"field {name!r} holds half of a surrogate pair; escape the character as two \\u codes"
        raise RowError(text, "half of a surrogate pair")
    return found


def _part(part: Any, name: str) -> str:
    """A text of a list, or a content part of chat exports, ``{type: text, text: ...}``."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or "type" not in part:
        raise RowError(f"field {name!r} is a list with {kind_of(part)}; it must be text or a list of texts", NO_TEXT)
    kind, text = part["type"], part.get("text")
    if kind in ("text", "input_text", "output_text") and isinstance(text, str):
        return text
    if kind in ("text", "input_text", "output_text"):
        raise RowError(f"field {name!r} has a content part of type text without a text; fill or remove it", NO_TEXT)
    named = f"of type {kind}" if kind in OTHER_PARTS else "of another type"
    raise RowError(f"field {name!r} has a content part {named}; only parts of type text can be used", "not a text part")


def _label(values: Mapping[str, Any], label: Label) -> str | None:
    """What the row itself says about its language or domain."""
    return None if label.field is None else _single(values, label.field)


def _single(values: Mapping[str, Any], name: str) -> str | None:
    """A group or label: one value as text, None where the row has none."""
    found = lookup(values, name)
    if found is ABSENT:
        return None
    if isinstance(found, (list, tuple, Mapping)):
        raise RowError(f"field {name!r} is {kind_of(found)}; it must be a single value", "not a single value")
    return canonical(found) or None


def _absent(values: Mapping[str, Any], name: str) -> str:
    return f"no field {name!r}; there are: {shown_names('field', sorted(map(str, values)), (name,))}"
