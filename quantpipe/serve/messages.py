"""The turns of a conversation, as clients send them and as chat templates read them."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantpipe.serve.fields import Text, only_neutral

# Parts of an assistant message that clients send back as they received them.
NEUTRAL_IN_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
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


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_aside_what_is_not_served(cls, values: Any) -> Any:
        return only_neutral(values, NEUTRAL_IN_MESSAGE) if isinstance(values, dict) else values

    def for_template(self) -> dict[str, str]:
        """What chat templates read: parts joined by line breaks, and ``developer`` under its older name."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        message: dict[str, str] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}
