"""Calls within ``<tool_call>`` marks, however the text is cut."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.serve.tools.calls import Call, Content
from quantpipe.serve.tools.hermes import HermesParser
from tests.serve.tools.conftest import read_all

Read = Callable[..., list[Any]]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALLED = Call("weather", '{"city": "Zürich"}')

ANSWERS: list[tuple[str, list[Any] | None]] = [
    ("", []),
    ("plain text, 1 < 2 <tool> and <tool_cal", [Content("plain text, 1 < 2 <tool> and <tool_cal")]),
    ("ends in blanks \n", [Content("ends in blanks \n")]),
    (WEATHER, [CALLED]),
    (WEATHER + "\n", [CALLED]),
    (WEATHER + "\n" + WEATHER, [CALLED, CALLED]),
    ("Let me see.\n" + WEATHER + "\n\nDone.", [Content("Let me see."), CALLED, Content("Done.")]),
    (WEATHER.removesuffix("\n</tool_call>"), [CALLED]),
    ('<tool_call>{"name":"add","arguments":{}}</tool_call>', [Call("add", "{}")]),
    ('<tool_call>{"name":"add"}</tool_call>', [Call("add", "{}")]),
    ('<tool_call>{"name":"add","parameters":{"a":1}}</tool_call>', [Call("add", '{"a": 1}')]),
    ('<tool_call>{"name":"add","arguments":"{\\"a\\":1}"}</tool_call>', [Call("add", '{"a": 1}')]),
    (
        '<tool_call>{"name":"add","arguments":{"a":"</tool_call> \\" \\\\"}}</tool_call>',
        [Call("add", '{"a": "</tool_call> \\" \\\\"}')],
    ),
    ('<tool_call>{"name":"add","arguments":{"a":"\\ud800"}}</tool_call>', [Call("add", '{"a": "\\ud800"}')]),
    ("<tool_call>not JSON</tool_call>!", [Content("<tool_call>not JSON</tool_call>!")]),
    ("<tool_call>bad</tool_call>" + WEATHER, [Content("<tool_call>bad</tool_call>"), CALLED]),
    ('<tool_call>{"name":"other","arguments":{}}</tool_call>', None),
    ('<tool_call>{"name":["add"],"arguments":{}}</tool_call>', None),
    ('<tool_call>{"name":"add","arguments":[1]}</tool_call>', None),
    ('<tool_call>{"name":"add","arguments":{"a":NaN}}</tool_call>', None),
    ("<tool_call>" + '{"a":' * 5000 + "</tool_call>", None),
    ('<tool_call>{"name":"add","argum', None),
]


@pytest.mark.parametrize(("text", "parts"), ANSWERS, ids=lambda part: str(part)[:40])
def test_answer_is_taken_apart_whole_or_character_by_character(read: Read, text: str, parts: list[Any] | None) -> None:
    expected = [Content(text)] if parts is None else parts
    assert read(HermesParser, text) == expected
    assert read(HermesParser, text, range(len(text))) == expected


@given(st.sampled_from([text for text, _ in ANSWERS if len(text) < 300]), st.lists(st.integers(0, 200)))
def test_cuts_change_nothing(text: str, cuts: list[int]) -> None:
    assert read_all(HermesParser, text, [cut for cut in cuts if cut < len(text)]) == read_all(HermesParser, text)


def test_content_is_given_out_before_the_answer_ends_and_marks_never() -> None:
    parser = HermesParser(frozenset({"weather"}))
    assert parser.push("Let me ") == [Content("Let me")]
    assert parser.push("see <tool") == [Content(" see")]
    assert parser.push("box> <tool_call>{") == [Content(" <toolbox>")]
    assert parser.push(WEATHER.removeprefix("<tool_call>\n{")) == [CALLED]


def test_calls_have_names_of_their_own() -> None:
    first, second = read_all(HermesParser, WEATHER + WEATHER)
    assert isinstance(first, Call) and isinstance(second, Call)
    assert first.id != second.id and first.id.startswith("call_")
