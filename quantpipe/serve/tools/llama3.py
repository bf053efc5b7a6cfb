"""Calls as Llama 3 writes them: an answer that is nothing but ``{"name": ..., "parameters": {...}}``, or several."""

import json
from typing import Any

from quantpipe.serve.tools.calls import Call, Content, Part, as_call, loads

PYTHON_TAG = "<|python_tag|>"  # may stand before calls


class Llama3Parser:
    """An answer that begins like a call is held back to its end, as only then it is known to be nothing else."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_content = False

    def push(self, text: str) -> list[Part]:
        """All of an answer that does not begin like a call."""
        if self._is_content:
            return [Content(text)] if text else []
        self._held += text
        start = self._held.lstrip()
        if not start or start.startswith(("{", PYTHON_TAG)) or PYTHON_TAG.startswith(start):
            return []
        held, self._held, self._is_content = self._held, "", True
        return [Content(held)]

    def finish(self) -> list[Part]:
        """The calls, if the answer is nothing else."""
        held, self._held = self._held, ""
        calls = _calls(held.strip().removeprefix(PYTHON_TAG), self._names)
        if calls:
            return list(calls)
        return [Content(held)] if held else []


def _calls(text: str, names: frozenset[str]) -> list[Call]:
    """Every call of a text of calls with ``;`` or blanks between them; none where there is anything else."""
    calls: list[Call] = []
    rest = text.strip()
    while rest:
        end = _end_of_value(rest)
        call = as_call(loads(rest[:end]), names) if end else None
        if call is None:
            return []
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _end_of_value(text: str) -> int:
    """Where the JSON value that ``text`` begins with ends; 0 where there is none."""
    decoder = json.JSONDecoder()
    try:
        decoded: tuple[Any, int] = decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return 0
    return decoded[1]
