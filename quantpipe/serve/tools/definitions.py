"""Tools and the choice among them, as clients of the OpenAI API describe them."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from quantpipe.serve.fields import Text

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionDefinition(BaseModel):
    """A function: what it is called and for, and the JSON schema of its arguments, which are an object."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        if (self.parameters or {}).get("type", "object") != "object":
            raise PydanticCustomError("parameters", "parameters must be a JSON schema of type object")
        return self


class Tool(BaseModel):
    """A tool; functions are the only kind."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(BaseModel):
    """The name of the function that must be called."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: ToolName


class NamedToolChoice(BaseModel):
    """The one tool that must be called."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def check_choice(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    """A validation error where a tool is there twice, or the chosen one is not there."""
    names = [tool.function.name for tool in tools or ()]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PydanticCustomError("tools", "{param} holds '{name}' twice", {"param": "tools", "name": twice})
    if choice is None or choice in ("none", "auto"):
        return
    if not names:
        raise PydanticCustomError("tool_choice", "{param} needs tools", {"param": "tool_choice"})
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise PydanticCustomError(
            "tool_choice",
            "{param} names '{name}', which is not among the tools",
            {"param": "tool_choice", "name": choice.function.name},
        )
