"""What went wrong in a Jinja template: its line and the kind of mistake, in the template's own words only.

What an exception says may quote a row. It is therefore looked up in the template, and left out where it is not there.
"""

import re
from collections.abc import Iterator
from types import TracebackType

from jinja2 import Environment, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError

MOST_EXPRESSIONS = 3
LONGEST_SAID = 100
# What Python says of types, never of values.
_OF_TYPES = re.compile(
    r"can only concatenate \w+ \(not \"\w+\"\) to \w+"
    r"|unsupported operand type\(s\) for [^\w\s]+: '\w+' and '\w+'"
    r"|'\w+' object is not (iterable|callable|subscriptable|a mapping)"
    r"|object of type '\w+' has no len\(\)"
    r"|'[<>=]+' not supported between instances of '\w+' and '\w+'"
    r"|division by zero"
)
_HAS_NO = re.compile(r"has no (?:attribute|element) (.+)", re.DOTALL)
_IS_UNDEFINED = re.compile(r"'(.+)' is undefined", re.DOTALL)


def line_of(error: Exception) -> int | None:
    """The line of the template where it was raised; None where no template was running."""
    if isinstance(error, TemplateSyntaxError):
        return error.lineno
    line, frame = None, error.__traceback__
    while frame is not None:
        if _is_of_template(frame):
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def mistake_in(text: str, error: Exception, own_words: str = "") -> str:
    """The kind of mistake in the template ``text``; ``own_words`` is what may be said beside what stands in there."""
    said = str(error)
    if isinstance(error, TemplateSyntaxError):
        return f"not a Jinja template: {error.message}"
    if isinstance(error, UndefinedError):
        return _undefined(text, said, line_of(error))
    if said and said in f"{text}\n{own_words}":
        return said[:LONGEST_SAID]
    if isinstance(error, SecurityError):
        return "something that the sandbox does not allow"
    if type(error) is TemplateError:
        return "raise_exception was called"
    return said if _OF_TYPES.fullmatch(said) else type(error).__name__


def _is_of_template(frame: TracebackType) -> bool:
    """Whether Jinja put this frame in place of one of the code that it made from a template."""
    return "__jinja_exception__" in frame.tb_frame.f_globals


def _undefined(text: str, said: str, line: int | None) -> str:
    if found := _IS_UNDEFINED.fullmatch(said):
        names = [node for node in _parsed(text) if isinstance(node, nodes.Name) and node.name == found[1]]
        return f"{found[1]}: no such variable" if names else "no such variable"
    if not (found := _HAS_NO.search(said)):
        return "a value that is not there"
    every = [node for node in _parsed(text) if isinstance(node, nodes.Getattr | nodes.Getitem)]
    named = [node for node in every if found[1] == repr(_key(node))]
    computed = [node for node in every if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Const)]
    here = next((few for group in (named, computed) if (few := [n for n in group if n.lineno == line])), None)
    written = list(dict.fromkeys(_written(node) for node in here or named))[:MOST_EXPRESSIONS]
    return f"{' or '.join(written)}: no such attribute" if written else "no such attribute"


def _parsed(text: str) -> Iterator[nodes.Node]:
    """The parts of a template; none where it takes extensions that are not known here."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError:
        return iter(())
    return tree.find_all((nodes.Name, nodes.Getattr, nodes.Getitem))


def _key(node: nodes.Getattr | nodes.Getitem) -> object:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) else None


def _written(node: nodes.Node) -> str:
    """An expression as the template writes it, as far as it is one of names, attributes and items."""
    match node:
        case nodes.Name():
            return node.name
        case nodes.Const():
            return repr(node.value)
        case nodes.Getattr():
            return f"{_written(node.node)}.{node.attr}"
        case nodes.Getitem():
            return f"{_written(node.node)}[{_written(node.arg)}]"
        case _:
            return "(...)"
