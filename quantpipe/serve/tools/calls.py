"""Text that a model wrote, taken apart into what it says and the calls it makes. Knows no format of its own."""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol


@dataclass(frozen=True)
class Content:
    """Text for the reader; never empty."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool; ``arguments`` is the JSON of an object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


Part = Content | Call


class ToolParser(Protocol):
    """Reads one answer in pieces. However it is cut, the same parts come of it; none of its text is lost."""

    def push(self, text: str) -> list[Part]:
        """What is certain now."""

    def finish(self) -> list[Part]:
        """What remains, when nothing more will come: what proved to be no call is content."""


class CallReader:
    """A parser that hands out the first call only, unless calls may be ``parallel``."""

    def __init__(self, parser: ToolParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """Parts of the answer that are certain now."""
        return self._counted(self._parser.push(text))

    def finish(self) -> list[Part]:
        """The remaining parts."""
        return self._counted(self._parser.finish())

    def _counted(self, parts: Iterable[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, Call):
                if self.num_calls and not self._parallel:
                    continue
                self.num_calls += 1
            kept.append(part)
        return kept


def as_call(value: Any, names: frozenset[str]) -> Call | None:
    """The call that a JSON value describes, if it names one of the tools; arguments may be JSON within JSON."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = loads(arguments)
    return Call(name, dumps(arguments)) if isinstance(arguments, dict) else None


def loads(text: str) -> Any:
    """A JSON value; None where it is none, or null, or has no place in JSON that others read."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def dumps(value: Any) -> str:
    """JSON that can be sent: half of a surrogate pair stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
