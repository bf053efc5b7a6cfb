"""Grammars of forced calls: what they allow is what the parser of the same format reads."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantpipe.engine.constraint import Grammar
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.guided.compiler import GrammarCompiler
from quantpipe.serve.tools.calls import Call
from quantpipe.serve.tools.definitions import FunctionDefinition
from quantpipe.serve.tools.formats import TOOL_FORMATS, format_of

QWEN = '{% if tools %}<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>{% endif %}'
CITY = {"type": "object", "properties": {"city": {"enum": ["Bern", 'Z"ü']}}, "required": ["city"]}
FUNCTIONS = [
    FunctionDefinition(name="weather", parameters=CITY | {"additionalProperties": False}),
    FunctionDefinition(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False}),
]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.open(tiny_llama)


def text_of(tokenizer: Tokenizer, grammar: str, seed: int) -> str:
    """A text of the language, chosen at random token by token, which ends as soon as it may."""
    matcher = GrammarCompiler(tokenizer).compile(Grammar("lark", grammar))
    rng, token_ids = random.Random(seed), []
    while True:
        allowed = np.flatnonzero(matcher.allowed_V(tokenizer.vocab_size)).tolist()
        if tokenizer.eos_token_id in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return tokenizer.decode(token_ids)
        allowed = [token_id for token_id in allowed if token_id != tokenizer.eos_token_id]
        token_ids.append(rng.choice(allowed))
        matcher.append(token_ids[-1])


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_every_text_of_the_grammar_is_read_as_calls_that_fit(tokenizer: Tokenizer, name: str, parallel: bool) -> None:
    own = TOOL_FORMATS[name]
    grammar, names = own.grammar(FUNCTIONS, parallel, ()), frozenset({"weather", "now"})
    most = 0
    for seed in range(12):
        parser = own.parser(names)
        parts: list[Any] = [*parser.push(text_of(tokenizer, grammar, seed)), *parser.finish()]
        assert parts and all(isinstance(part, Call) for part in parts)
        most = max(most, len(parts))
        for call in parts:
            arguments = json.loads(call.arguments)
            assert arguments["city"] in CITY["properties"]["city"]["enum"] if call.name == "weather" else not arguments  # type: ignore[index]
    assert (most > 1) == (parallel and own.separator is not None)


def test_marks_that_are_tokens_of_their_own_are_written_as_such() -> None:
    grammar = TOOL_FORMATS["hermes"].grammar(FUNCTIONS[:1], False, ("<tool_call>",))
    assert 'call: <tool_call> "\\n" (call_0) "\\n" "</tool_call>"' in grammar.splitlines()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (QWEN, "hermes"),
        ('<|start_header_id|>{{ \'{"name": ..., "parameters": ...}\' }}', "llama3"),
        ('<tool_call>\n<function=name>{% "arguments" %}', None),
        ("<tool_call>{name}\n<arg_key>", None),
        ("[TOOL_CALLS]", None),
        ("", None),
    ],
)
def test_format_is_the_one_that_the_template_shows(template: str, name: str | None) -> None:
    assert format_of(template) == name


def test_every_format_can_be_named_when_a_server_is_started() -> None:
    from quantpipe.cli import serve

    [option] = [own for own in serve.params if own.name == "tool_parser"]
    assert list(option.type.choices) == list(TOOL_FORMATS)
