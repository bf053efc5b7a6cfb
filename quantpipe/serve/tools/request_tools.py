"""What one request may call, must call, and how its answers are read."""

import json
from dataclasses import dataclass
from typing import Any

from quantpipe.engine.constraint import Grammar
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.serve.tools.calls import CallReader
from quantpipe.serve.tools.definitions import NamedToolChoice, Tool, ToolChoice
from quantpipe.serve.tools.formats import TOOL_FORMATS, ToolFormat


@dataclass(frozen=True)
class ToolSupport:
    """What the served model knows of tools: ``format_name`` of its calls, and whether its chat template shows them."""

    format_name: str | None
    is_in_template: bool

    def format(self) -> ToolFormat:
        """Raises RequestError where a request with tools cannot be answered."""
        if not self.is_in_template:
            raise RequestError("tools: the model's chat template knows none; leave them out", "tools")
        if self.format_name is None:
            raise RequestError(
                "tools: the chat template does not tell in which format this model writes its calls; start the server "
                f"with --tool-parser ({', '.join(TOOL_FORMATS)}) or leave them out",
                "tools",
            )
        return TOOL_FORMATS[self.format_name]


@dataclass(frozen=True)
class RequestTools:
    """The tools of one request that may be called."""

    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool
    format: ToolFormat
    special_marks: tuple[str, ...]

    @classmethod
    def of(
        cls,
        tools: list[Tool] | None,
        choice: ToolChoice | None,
        parallel: bool | None,
        support: ToolSupport,
        tokenizer: Tokenizer,
    ) -> "RequestTools | None":
        """None where nothing may be called. Raises RequestError where the model cannot call tools."""
        if not tools or choice == "none":
            return None
        format = support.format()
        special = tuple(mark for mark in format.marks if tokenizer.is_special(mark))
        return cls(tuple(tools), choice or "auto", parallel is not False, format, special)

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates read them, which is as clients sent them."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    @property
    def form(self) -> tuple[str, Grammar] | None:
        """The grammar of the calls that must be made, and the field that describes them; None where none must."""
        if self.choice == "auto":
            return None
        functions = [tool.function for tool in self.tools]
        parallel = self.parallel
        if isinstance(self.choice, NamedToolChoice):
            chosen = self.choice.function.name
            functions, parallel = [function for function in functions if function.name == chosen], False
        try:
            return "tools", Grammar("lark", self.format.grammar(functions, parallel, self.special_marks))
        except (ValueError, RecursionError) as error:
            raise RequestError("tools: parameters must be JSON schemas of little nesting", "tools") from error

    def reader(self) -> CallReader:
        """A reader of one answer."""
        names = frozenset(tool.function.name for tool in self.tools)
        return CallReader(self.format.parser(names), self.parallel)


def arguments_for_template(arguments: str) -> Any:
    """Templates write arguments as JSON themselves; what is none reaches them as the text it is."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
