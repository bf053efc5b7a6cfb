"""How the fields of a row become a sample: which hold the text, what is kept, what a label is. Reads no rows.

The docstrings under the fields are the reference of the file format.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from quantpipe.recipe.document import describe
from quantpipe.recipe.section import Count, Section

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


def _names(value: Any) -> Any:
    """One field name or a list of them, as a tuple."""
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"found {describe(value)}; allowed: a field name, or a list of field names")
    return names


def _values(value: Any) -> Any:
    """One value or a list of them, each as the text that rows are compared with."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not values or any(isinstance(each, (list, tuple, dict)) for each in values):
        raise ValueError(f"found {describe(value)}; allowed: a value, or a list of values")
    return tuple(canonical(each) for each in values)


def _label(value: Any) -> Any:
    if isinstance(value, str):
        return {"value": value}
    if isinstance(value, (dict, Label)):
        return value
    raise ValueError(f"found {describe(value)}; allowed: a name, or a mapping {{field: <name of a field>}}")


def canonical(value: Any) -> str | None:
    """A single value as filters and groups compare it, whatever the file format made of it; None for none."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


_TEXT, _TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
ONE_OR_MORE = WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})
Names = Annotated[tuple[str, ...], BeforeValidator(_names), ONE_OR_MORE]
Values = Annotated[tuple[str | None, ...], BeforeValidator(_values)]


class Fields(Section):
    """Which fields of a row hold the sample: ``text``, or ``messages``, or ``prompt`` with ``response``.

    A name with dots reaches into objects where no field has the whole name. Several names: their texts are joined by a
    blank line, empty ones left out.
    """

    text: Names | None = None
    """Field, or list of fields, with plain text."""
    prompt: Names | None = None
    """Field, or list of fields, with what the user says; needs `response`."""
    response: Names | None = None
    """Field, or list of fields, with what the model should answer; needs `prompt`."""
    system: Names | None = None
    """Field, or list of fields, with the system message before `prompt`; rows where it is empty have none."""
    messages: Text | None = None
    """Field with a conversation: a list of objects, or one written as JSON."""
    role: Text = "role"
    """Key of a message that holds who speaks."""
    content: Text = "content"
    """Key of a message that holds what is said: text, a list of texts, or content parts `{type: text, text: ...}`."""
    roles: dict[Text, Role] = Field(default_factory=dict)
    """Speakers that the file calls otherwise than `system`, `user`, `assistant`, `tool`: `{客服: assistant}`."""

    @model_validator(mode="after")
    def _one_form(self) -> "Fields":
        given = [key for key in ("text", "messages", "prompt", "response") if getattr(self, key) is not None]
        if given not in (["text"], ["messages"], ["prompt", "response"]):
            found = " and ".join(given) or "none of them"
            raise ValueError(f"found {found}; allowed: text, or messages, or prompt with response")
        if self.system is not None and self.prompt is None:
            raise ValueError("system goes with prompt and response; a conversation has its own system message")
        return self

    @property
    def is_conversation(self) -> bool:
        """Whether the sample is a list of messages, which only a template turns into text."""
        return self.messages is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Every field that is read."""
        groups = (self.text, self.prompt, self.response, self.system, self.messages and (self.messages,))
        return tuple(name for group in groups for name in group or ())


class Label(Section):
    """What rows are labelled with: one ``value`` for all of them, or what their ``field`` says."""

    value: Text | None = None
    """The label of all rows; a plain text is short for it."""
    field: Text | None = None
    """Field that holds each row's label."""

    @model_validator(mode="after")
    def _one(self) -> "Label":
        if (self.value is None) == (self.field is None):
            raise ValueError("allowed: a name, or a mapping {field: <name of a field>}")
        return self


class Filter(Section):
    """Which rows are used; the others are counted as filtered."""

    min_chars: Count | None = None
    """Fewest characters of a sample's text."""
    max_chars: Count | None = None
    """Most characters of a sample's text."""
    where: dict[Text, Values] = Field(default_factory=dict)
    """Field -> a value or a list of values: only rows that have one of them, in each of the fields, are used."""
    exclude: dict[Text, Values] = Field(default_factory=dict)
    """Field -> a value or a list of values: rows that have one of them, in any of the fields, are left out."""

    @model_validator(mode="after")
    def _range(self) -> "Filter":
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            raise ValueError(f"min_chars {self.min_chars} is more than max_chars {self.max_chars}; no row has both")
        return self


def _not_auto(label: Label | None) -> Label | None:
    if label is not None and label.value == "auto":
        raise ValueError("'auto' is for languages; allowed: a name, or a mapping {field: <name of a field>}")
    return label


_NAME_OR_FIELD = WithJsonSchema({"anyOf": [_TEXT, {"type": "object"}]})
Language = Annotated[Label | None, BeforeValidator(_label), _NAME_OR_FIELD]
Domain = Annotated[Label | None, BeforeValidator(_label), AfterValidator(_not_auto), _NAME_OR_FIELD]
