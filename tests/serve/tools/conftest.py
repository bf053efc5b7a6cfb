"""Answers read whole and in every kind of pieces."""

import itertools
from collections.abc import Callable, Iterable

import pytest

from quantpipe.serve.tools.calls import Content, Part, ToolParser

MakeParser = Callable[[frozenset[str]], ToolParser]
NAMES = frozenset({"weather", "add"})


def joined(parts: Iterable[Part]) -> list[Part]:
    """With neighbouring texts in one, as a client sees them."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Content):
            assert part.text
            if found and isinstance(found[-1], Content):
                part = Content(found.pop().text + part.text)  # type: ignore[union-attr]
        found.append(part)
    return found


def read_all(make: MakeParser, text: str, cuts: Iterable[int] = ()) -> list[Part]:
    parser = make(NAMES)
    places = sorted({0, len(text), *cuts})
    parts: list[Part] = []
    for start, end in itertools.pairwise(places):
        parts += parser.push(text[start:end])
    return joined([*parts, *parser.finish()])


@pytest.fixture
def read() -> Callable[..., list[Part]]:
    """``read(parser, text, cuts)``: the parts of ``text`` that comes in pieces."""
    return read_all
