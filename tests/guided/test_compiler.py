"""Grammars against a real tokenizer: what they let through, what is refused, and what compiling may cost."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quantpipe.engine.constraint import Grammar
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.guided.compiler import MAX_GRAMMAR_CHARS, NUM_CACHED, GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.open(tiny_llama)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    """Whether every token of ``text`` is allowed in turn, and then the end."""
    matcher = compiler.compile(grammar)
    assert tokenizer.eos_token_id is not None
    for token_id in [*tokenizer.encode(text), tokenizer.eos_token_id]:
        if not matcher.allowed_V(tokenizer.vocab_size)[token_id]:
            return False
        matcher.append(token_id)
    return True


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("regex", r"[a-c]+\d?"), ["abc", "a1"], ["", "d", "a12", "abc "]),
        (Grammar("regex", "a/b"), ["a/b"], ["a"]),
        (Grammar("regex", "ü|你好"), ["ü", "你好"], ["u", "你"]),
        (Grammar("json_schema", json.dumps({"type": "object"})), ["{}", '{"a": [1, null]}'], ["[]", "1", "{} "]),
        (
            Grammar("json_schema", json.dumps(PERSON)),
            ['{"name": "Jo", "age": 5}', '{"name":"Jo","age":5}', '{\n  "name": "é",\n  "age": -1\n}'],
            ['{"name": "Jo"}', '{"age": 5, "name": "Jo"}', '{"name": "Jo", "age": 5.5}', '{"name": "Jo", "age": 5, "a'],
        ),
        (Grammar("json_schema", json.dumps({"type": "object"})), ["{" + " " * 60 + "}"], ["{" + " " * 80 + "}"]),
        (Grammar("lark", 'start: "yes" | "no\\n"'), ["yes", "no\n"], ["no", "yes no"]),
    ],
    ids=lambda part: str(part)[:40],
)
def test_texts_of_the_language_pass_and_others_do_not(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(compiler, tokenizer, grammar, text)] == []
    assert [text for text in bad if accepts(compiler, tokenizer, grammar, text)] == []


COSTLY = [{"pattern": "(.*a.*){8}"}, {"pattern": "(.*b.*){8}"}]  # both at once: a product of automata
BAD_GRAMMARS: list[tuple[Grammar, str]] = [
    (Grammar("regex", "(("), "unclosed group"),
    (Grammar("regex", "(?=a)b"), "look-around"),
    (Grammar("regex", "[" * 20_000), "invalid regex"),
    (Grammar("regex", "(" * 20_000 + ")" * 20_000), "invalid regex"),
    (Grammar("json_schema", json.dumps({"type": "string", "allOf": COSTLY})), "Unable to determine"),
    (Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), "65,537 characters are too many"),
    (Grammar("json_schema", "{"), "EOF while parsing"),
    (Grammar("json_schema", "5"), "Expecting object schema"),
    (Grammar("json_schema", '{"type": "objekt"}'), "objekt"),
    (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    (Grammar("json_schema", '{"x-guidance": {"lenient": true}, "uniqueItems": true, "type": "array"}'), "uniqueItems"),
    (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), "minLength"),
    (Grammar("json_schema", '{"$ref": "#"}'), "no text obeys it"),
    (Grammar("json_schema", '{"$ref": "http://127.0.0.1:1/schema"}'), "does not fetch"),
    (Grammar("json_schema", '{"items":' * 400 + "{}" + "}" * 400), "recursion limit"),
    (Grammar("lark", "start: undefined_rule"), "undefined_rule"),
]


@pytest.mark.parametrize(("grammar", "reason"), BAD_GRAMMARS, ids=lambda part: str(part)[:60])
def test_grammar_that_cannot_be_obeyed_is_refused_in_one_line(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        compiler.compile(grammar)
    assert caught.value.param == "grammar"
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_matchers_of_one_grammar_go_their_own_ways(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar, num = Grammar("regex", "ab|cd"), tokenizer.vocab_size
    first, second = compiler.compile(grammar), compiler.compile(grammar)
    [a, c] = [tokenizer.encode(letter)[0] for letter in "ac"]
    first.append(a)
    assert not first.allowed_V(num)[c] and second.allowed_V(num)[c]
    twin = second.copy()
    twin.append(c)
    assert second.allowed_V(num)[a] and not twin.allowed_V(num)[a]


def test_after_a_token_that_was_not_allowed_none_is(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Grammar("regex", "ab"))
    matcher.append(tokenizer.encode("z")[0])
    assert matcher.failure is not None and "\n" not in matcher.failure
    assert not matcher.allowed_V(tokenizer.vocab_size).any()


def test_vocabulary_of_the_model_may_be_wider_and_have_several_ends(tokenizer: Tokenizer) -> None:
    num, end = tokenizer.vocab_size, tokenizer.eos_token_id
    assert end is not None
    other = tokenizer.encode("z")[0]
    matcher = GrammarCompiler(tokenizer, num + 70, [end, other, num + 3]).compile(Grammar("regex", "a?"))
    allowed = np.flatnonzero(matcher.allowed_V(num + 70)).tolist()
    assert end in allowed and other in allowed and max(allowed) < num
    assert len(matcher.allowed_V(num - 5)) == num - 5


def test_what_was_compiled_is_kept_but_not_without_end(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    for number in range(NUM_CACHED + 10):
        compiler.compile(Grammar("regex", f"a{number}"))
    assert len(compiler._cache) == NUM_CACHED
    assert Grammar("regex", "a0") not in compiler._cache
    compiler.compile(Grammar("regex", "a20"))
    assert next(reversed(compiler._cache)) == Grammar("regex", "a20")


def test_where_llguidance_is_missing_grammars_are_refused_and_nothing_else_changes(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(tokenizer)
    with pytest.raises(RequestError, match="llguidance is not installed here; install it or ask for plain text"):
        compiler.compile(Grammar("regex", "a"))


def test_llguidance_is_not_loaded_before_it_is_needed() -> None:
    code = "import sys, quantpipe.guided.compiler, quantpipe.engine.engine; assert 'llguidance' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
