"""Grammars compiled by llguidance, which is loaded when the first one comes, and bounded in what one may cost.

An Earley parser over a lexer of derivatives gives the mask of a token in tens of microseconds; what could make it slow
is bounded by its own limits ("fuel"), so that a grammar is refused, or its request ended, where it exceeds them.
"""

import importlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from quantpipe.engine.constraint import Grammar
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.guided.matcher import GrammarMatcher, one_line

MAX_GRAMMAR_CHARS = 65_536
NUM_CACHED = 64
# About a quarter of a second for all that is built at the start, and some ten milliseconds for a token.
LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
# Small models asked for JSON may write spaces for ever: no gap is longer than this. A schema may not say otherwise.
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \t\n\r]{1,64}", "lenient": False}


class GrammarCompiler:
    """Compiles grammars for one model; the latest are kept, so that to ask for one again costs next to nothing.

    Without ``vocab_size`` and ``eos_token_ids``, which are the model's, those of the tokenizer are taken: enough to
    find out whether a grammar can be obeyed.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int | None = None, eos_token_ids: Sequence[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size or 0, tokenizer.vocab_size)
        own_end = tokenizer.eos_token_id
        ends = [own_end or 0] if eos_token_ids is None else eos_token_ids
        # llguidance wants none that the tokenizer does not know, which nobody could read anyway.
        self._eos_token_ids = [token_id for token_id in ends if token_id < tokenizer.vocab_size]
        self._lock = threading.Lock()
        self._loaded: tuple[ModuleType, Any] | None = None
        self._cache: OrderedDict[Grammar, GrammarMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at its beginning, whose first mask is known to be within the limits.

        RequestError where llguidance is missing, or cannot read the grammar or this tokenizer, or where it costs too
        much or no text can obey it.
        """
        with self._lock:
            cached = self._cache.get(grammar)
            if cached is not None:
                self._cache.move_to_end(grammar)
                return cached.copy()
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise _refusal(f"{len(grammar.text):,} characters are too many; at most {MAX_GRAMMAR_CHARS:,} are taken")
        matcher = self._build(grammar)
        with self._lock:
            self._cache[grammar] = matcher
            if len(self._cache) > NUM_CACHED:
                self._cache.popitem(last=False)
        return matcher.copy()

    def load(self) -> None:
        """Take now what the first grammar would take otherwise, which holds up every thread: 10 us per token.

        RequestError as of ``compile``, where every grammar will be refused.
        """
        self._load()

    def _build(self, grammar: Grammar) -> GrammarMatcher:
        library, tokens = self._load()
        try:
            source = _source(library, grammar)
        except ValueError as error:
            raise _refusal(one_line(str(error))) from error
        limits = library.LLParserLimits(verbose_errors=False, **LIMITS)
        matcher = GrammarMatcher(library.LLMatcher(tokens, source, log_level=0, limits=limits))
        if matcher.failure is None:
            matcher.allowed_V(self._vocab_size)  # much is only built for the first mask
        if matcher.failure is not None:
            raise _refusal(matcher.failure)
        return matcher

    def _load(self) -> tuple[ModuleType, Any]:
        """The library, and the vocabulary as it wants it."""
        with self._lock:
            if self._loaded is None:
                try:
                    library = importlib.import_module("llguidance")
                except ImportError as error:
                    raise _refusal("llguidance is not installed here; install it or ask for plain text") from error
                try:
                    tokens = library.LLTokenizer(
                        self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                    )
                except ValueError as error:
                    reason = one_line(str(error))
                    raise _refusal(f"llguidance cannot use this model's tokenizer ({reason})") from error
                self._loaded = library, tokens
            return self._loaded


def _source(library: ModuleType, grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            source = library.LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)
        case "regex":
            source = library.LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            source = library.LLMatcher.grammar_from_lark(grammar.text)
    return str(source)


def _refusal(reason: str) -> RequestError:
    return RequestError(f"grammar: {reason}", "grammar")
