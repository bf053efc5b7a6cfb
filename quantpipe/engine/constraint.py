"""What a request's text must look like, as data, and what the engine needs of whoever enforces it. Knows no grammar.

The engine runs where no library of grammars is installed: one that is to obey them is given a ``ConstraintCompiler``.

Shapes: V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from quantpipe.errors import RequestError

GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)


@dataclass(frozen=True)
class Grammar:
    """The language that a text must belong to: a JSON schema (as JSON), a regular expression, or a Lark grammar."""

    kind: GrammarKind
    text: str


class Constraint(Protocol):
    """A grammar and how far one sequence has come in it."""

    @property
    def failure(self) -> str | None:
        """Why no token is allowed any more, though the text is not complete."""

    def allowed_V(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """The tokens that may come next. Where the text may end, the end-of-sequence tokens are among them."""

    def append(self, token_id: int) -> None:
        """The sequence has one more token. After one that was not allowed, none is."""

    def copy(self) -> "Constraint":
        """One that goes on by itself."""


class ConstraintCompiler(Protocol):
    """From a grammar to what enforces it. May be called from several threads at once."""

    def compile(self, grammar: Grammar) -> Constraint:
        """A constraint at its beginning. RequestError, with ``grammar`` as the parameter, where there can be none."""


def check_grammar(grammar: object) -> None:
    """RequestError where ``grammar`` is not one."""
    if not isinstance(grammar, Grammar):
        raise RequestError(f"grammar: {grammar!r} is not a quantpipe.engine.constraint.Grammar", "grammar")
    if grammar.kind not in GRAMMAR_KINDS or not isinstance(grammar.text, str):
        raise RequestError(f"grammar: kind {grammar.kind!r} is not one of {', '.join(GRAMMAR_KINDS)}", "grammar")
