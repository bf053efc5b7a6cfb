"""The formats of calls that are known: how each is read and written, and which one a chat template teaches."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantpipe.serve.tools import hermes, llama3
from quantpipe.serve.tools.calls import ToolParser
from quantpipe.serve.tools.definitions import FunctionDefinition

# As models are trained to write their arguments, which is how Python does.
JSON_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    ``before`` and ``after`` enclose the JSON of a call, whose arguments are called ``arguments_key``; ``marks`` are
    those texts in them that a tokenizer may have as special tokens. ``separator`` stands between calls; without it one
    answer makes one call.
    """

    parser: Callable[[frozenset[str]], ToolParser]
    arguments_key: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    separator: str | None = None

    def grammar(self, functions: Sequence[FunctionDefinition], parallel: bool, special_marks: Sequence[str]) -> str:
        """A Lark grammar of calls to these functions: at least one, at most one unless ``parallel``.

        ``special_marks`` are the marks that are tokens of their own, which Lark grammars name without quotes.
        """
        enclosed = [
            " ".join(mark if mark in special_marks else json.dumps(mark) for mark in side)
            for side in (self.before, self.after)
        ]
        more = f" ({json.dumps(self.separator)} call)*" if parallel and self.separator is not None else ""
        names = [f"call_{number}" for number in range(len(functions))]
        rules = [f"start: call{more}", f"call: {enclosed[0]} ({' | '.join(names)}) {enclosed[1]}"]
        for name, function in zip(names, functions, strict=True):
            opening = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
            rules.append(f"{name}: {json.dumps(opening)} {name}_arguments {json.dumps('}')}")
            rules.append(f"{name}_arguments: %json {json.dumps(_schema(function))}")
        return "\n".join(rules)


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        hermes.HermesParser,
        "arguments",
        before=(hermes.OPEN, "\n"),
        after=("\n", hermes.CLOSE),
        marks=(hermes.OPEN, hermes.CLOSE),
        separator="\n",
    ),
    "llama3": ToolFormat(llama3.Llama3Parser, "parameters"),
}


def format_of(template_source: str) -> str | None:
    """The name of the format that a chat template shows its model; None where it is none of these.

    Other models write other things within the same marks, and are told by their own.
    """
    if hermes.OPEN in template_source:
        return "hermes" if '"arguments"' in template_source and "<function=" not in template_source else None
    if "<|start_header_id|>" in template_source and '"parameters"' in template_source:
        return "llama3"
    return None


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    return {"type": "object"} | (function.parameters or {}) | JSON_STYLE
