"""The ways in which clients ask for text of a given form: OpenAI's ``response_format``, and vLLM's own fields."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quantpipe.engine.constraint import Grammar
from quantpipe.serve.fields import Text, only_neutral

MAX_SCHEMA_NAME_CHARS = 64
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')

Schema = dict[str, Any]
Choices = Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=1000)]


class NamedSchema(BaseModel):
    """A JSON schema as OpenAI wraps it; obeyed whether or not it says ``strict``."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Annotated[Text, Field(max_length=MAX_SCHEMA_NAME_CHARS)] | None = None
    description: Text | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Any text, any JSON object, or JSON of a schema."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_is_meant(self) -> Self:
        has_schema = self.json_schema is not None and self.json_schema.schema_ is not None
        if self.type == "json_schema" and not has_schema:
            raise PydanticCustomError("schema", "of type json_schema needs json_schema.schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise PydanticCustomError("schema", "json_schema needs type: json_schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """What is asked for, if anything."""
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            return grammar_of_schema(self.json_schema.schema_)
        return ANY_OBJECT if self.type == "json_object" else None


class StructuredOutputs(BaseModel):
    """vLLM's newer field: exactly one of its forms."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_: Schema | Text | None = Field(default=None, alias="json")
    regex: Annotated[Text, Field(min_length=1)] | None = None
    choice: Choices | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_aside_what_is_not_served(cls, values: Any) -> Any:
        return only_neutral(values, NEUTRAL_FORMS) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if len(self.grammars) != 1:
            raise PydanticCustomError("forms", "needs exactly one of json, regex, choice and json_object: true")
        return self

    @property
    def grammars(self) -> list[Grammar]:
        """One for each form that is given."""
        forms = [
            None if self.json_ is None else grammar_of_schema(self.json_),
            None if self.regex is None else Grammar("regex", self.regex),
            None if self.choice is None else grammar_of_choices(self.choice),
            ANY_OBJECT if self.json_object else None,
        ]
        return [form for form in forms if form is not None]


# Forms of structured_outputs that are not served -> the values, besides null, that ask for nothing.
NEUTRAL_FORMS: Mapping[str, tuple[Any, ...]] = {
    "grammar": (),
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "disable_fallback": (True, False),
}


def grammar_of_schema(schema: Schema | str) -> Grammar:
    """A schema, which clients may also send as JSON text."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(parsed, dict):
            return Grammar("json_schema", json.dumps(parsed, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("schema", "must be a JSON schema of finite numbers and little nesting") from error
    raise PydanticCustomError("schema", "must be a JSON schema, which is an object")


def grammar_of_choices(choices: list[str]) -> Grammar:
    """One of these texts."""
    return Grammar("lark", f"start: {' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)}")
