"""Calls as Hermes and Qwen write them in their text: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from quantpipe.serve.tools.calls import Content, Part, as_call, loads

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Blanks around calls belong to none of the parts. A call is given out once it is whole."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_inside = False
        self._num_searched = 0  # of what is held inside: it does not hold the end
        self._is_after_call = False  # with nothing but blanks since

    def push(self, text: str) -> list[Part]:
        """Content up to what may be the beginning of a call, and calls that are whole."""
        self._held += text
        parts: list[Part] = []
        while (self._close if self._is_inside else self._open)(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """A call that lacks its closing mark is one all the same; anything else is content."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return self._content(held)
        call = as_call(loads(held), self._names)
        return [Content(OPEN + held) if call is None else call]

    def _open(self, parts: list[Part]) -> bool:
        """Look for the beginning of a call; whether there is one."""
        start = self._held.find(OPEN)
        end = start if start >= 0 else len(self._held) - num_held_back(self._held, OPEN)
        text = self._held[:end]
        parts += self._content(text.rstrip() if start >= 0 else text)
        self._held = self._held[end + len(OPEN) :] if start >= 0 else self._held[end:]
        self._is_inside, self._num_searched = start >= 0, 0
        return self._is_inside

    def _close(self, parts: list[Part]) -> bool:
        """Look for the end of a call; whether there is one."""
        end = self._held.find(CLOSE, self._num_searched)
        if end < 0:
            self._num_searched = max(0, len(self._held) - len(CLOSE) + 1)
            return False
        body = self._held[:end]
        if _ends_in_a_string(body):  # the mark is part of an argument
            self._num_searched = end + len(CLOSE)
            return True
        call = as_call(loads(body), self._names)
        parts.append(Content(OPEN + body + CLOSE) if call is None else call)
        self._is_after_call = call is not None
        self._held, self._is_inside = self._held[end + len(CLOSE) :], False
        return True

    def _content(self, text: str) -> list[Part]:
        text = text.lstrip() if self._is_after_call else text
        if not text:
            return []
        self._is_after_call = False
        return [Content(text)]


def num_held_back(text: str, mark: str) -> int:
    """Length of the tail that may belong to a ``mark``: a beginning of it, and the blanks before that."""
    num = next((num for num in range(len(mark) - 1, 0, -1) if text.endswith(mark[:num])), 0)
    return len(text) - len(text[: len(text) - num].rstrip())


def _ends_in_a_string(json_text: str) -> bool:
    is_inside = is_escaped = False
    for character in json_text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = is_inside
        elif character == '"':
            is_inside = not is_inside
    return is_inside
