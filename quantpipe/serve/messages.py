"""The turns of a conversation, as clients send them and as chat templates read them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quantpipe.serve.fields import Text, only_neutral
from quantpipe.serve.tools.request_tools import arguments_for_template

# Parts of an assistant message that clients send back as they received them.
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}


class TextPart(BaseModel):
    """One part of a message's content; only text is served."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text"]
    text: Text


class CalledFunction(BaseModel):
    """A function and the arguments it was called with, as JSON."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: Text
    arguments: Text


class ToolCall(BaseModel):
    """A call that the assistant made, as clients received it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    function: CalledFunction
    id: Text | None = None
    type: Literal["function"] = "function"
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """What chat templates read."""
        arguments = arguments_for_template(self.function.arguments)
        called = {"type": self.type, "function": {"name": self.function.name, "arguments": arguments}}
        return called if self.id is None else called | {"id": self.id}


def _describe_by_role(schema: dict[str, Any]) -> None:
    """Say which parts belong to which role, as the validators of ChatMessage do."""
    parts = schema.pop("properties")
    del schema["type"], schema["required"], schema["additionalProperties"]
    content = {"anyOf": [form for form in parts["content"]["anyOf"] if form != {"type": "null"}]}
    calls = next(form for form in parts["tool_calls"]["anyOf"] if form != {"type": "null"}) | {"minItems": 1}

    def form(roles: list[str], required: str, **own: Any) -> dict[str, Any]:
        properties = {"role": {"type": "string", "enum": roles}, "name": parts["name"], **own}
        return {
            "type": "object",
            "properties": properties,
            "required": ["role", required],
            "additionalProperties": False,
        }

    schema["anyOf"] = [
        form(["system", "developer", "user"], "content", content=content),
        form(["assistant"], "content", content=content, tool_calls=parts["tool_calls"]),
        form(["assistant"], "tool_calls", content=parts["content"], tool_calls=calls),
        form(["tool"], "content", content=content, tool_call_id=parts["tool_call_id"]),
    ]


class ChatMessage(BaseModel):
    """One turn of the conversation: of an assistant's, content may be missing where it made calls.

    A ``tool`` answers the call ``tool_call_id``.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra=_describe_by_role)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_aside_what_is_not_served(cls, values: Any) -> Any:
        return only_neutral(values, NEUTRAL_IN_MESSAGE) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _parts_belong_to_the_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls belong to the assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise PydanticCustomError("tool_call_id", "tool_call_id belongs to the role tool")
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """What chat templates read: parts joined by line breaks, and ``developer`` under its older name."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for key, value in (("name", self.name), ("tool_call_id", self.tool_call_id)):
            if value is not None:
                message[key] = value
        return message
