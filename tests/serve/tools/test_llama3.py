"""Calls that are the whole answer, however the text is cut."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantpipe.serve.tools.calls import Call, Content
from quantpipe.serve.tools.llama3 import Llama3Parser
from tests.serve.tools.conftest import read_all

Read = Callable[..., list[Any]]
WEATHER = '{"name": "weather", "parameters": {"city": "Zürich"}}'
CALLED = Call("weather", '{"city": "Zürich"}')

ANSWERS: list[tuple[str, list[Any] | None]] = [
    ("", []),
    ("plain { text }", None),
    ("  \n", None),
    (WEATHER, [CALLED]),
    ("\n " + WEATHER + " \n", [CALLED]),
    ("<|python_tag|>" + WEATHER, [CALLED]),
    (WEATHER + "; " + WEATHER, [CALLED, CALLED]),
    (WEATHER + "\n" + WEATHER, [CALLED, CALLED]),
    ('{"name": "add", "arguments": {"a": 1}}', [Call("add", '{"a": 1}')]),
    (WEATHER + " and more", None),
    (WEATHER[:-1], None),
    ('{"name": "other", "parameters": {}}', None),
    ('{"answer": 5}', None),
    ("<|python_tag|>print(5)", None),
    ("<|python", None),
    ("{" * 3000, None),
    ('{"a":' * 5000, None),
]


@pytest.mark.parametrize(("text", "parts"), ANSWERS, ids=lambda part: str(part)[:40])
def test_answer_is_calls_or_text_whole_or_character_by_character(
    read: Read, text: str, parts: list[Any] | None
) -> None:
    expected = [Content(text)] if parts is None else parts
    assert read(Llama3Parser, text) == expected
    assert read(Llama3Parser, text, range(len(text))) == expected


@given(st.sampled_from([text for text, _ in ANSWERS if len(text) < 300]), st.lists(st.integers(0, 200)))
def test_cuts_change_nothing(text: str, cuts: list[int]) -> None:
    assert read_all(Llama3Parser, text, [cut for cut in cuts if cut < len(text)]) == read_all(Llama3Parser, text)


def test_text_that_does_not_begin_like_a_call_is_given_out_at_once() -> None:
    parser = Llama3Parser(frozenset({"weather"}))
    assert parser.push(" ") == []
    assert parser.push("The") == [Content(" The")]
    assert parser.push(" {") == [Content(" {")]
