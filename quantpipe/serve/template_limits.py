"""A sandbox for chat templates that bounds what rendering one may take: rounds of loops, time, and sizes of texts.

A template comes with a model folder, from whoever made it. Jinja's own sandbox keeps it from everything outside, but
not from running for ever or filling the memory, which would stop a server for all.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_ROUNDS = 200_000  # of all loops and macros together
MAX_RENDER_S = 10.0
MAX_TEXT_CHARS = 16_000_000
MAX_NUMBER = 100_000  # as an argument: widths, counts
GROWING_FILTERS = (
    *("batch", "center", "format", "indent", "join", "pprint", "replace", "slice", "string", "tojson", "wordwrap"),
)


class LimitError(TemplateError):
    """A template takes more than it may."""


class Meter:
    """What one rendering has taken so far."""

    def __init__(self) -> None:
        self._num_rounds = 0
        self._end_s = time.monotonic() + MAX_RENDER_S

    def count(self) -> None:
        """One more round of a loop, or call of a macro. Raises LimitError."""
        self._num_rounds += 1
        if self._num_rounds > MAX_ROUNDS:
            raise LimitError(f"more than {MAX_ROUNDS:,} rounds of loops")
        if time.monotonic() > self._end_s:
            raise LimitError(f"more than {MAX_RENDER_S:g} seconds")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Counts rounds of loops, and looks at sizes before texts are made that could be large."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """``filters`` replace Jinja's own, or are added to them."""
        super().__init__(finalize=_finalized, **options)
        self._current = threading.local()
        self.filters |= filters
        self.filters |= {name: _bounded_filter(self.filters[name]) for name in GROWING_FILTERS}
        del self.globals["lipsum"]  # text of any length, and no template's business

    def rendered(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of ``template``, whose limits begin anew. Raises LimitError."""
        self._current.meter = Meter()
        pieces, num_chars = [], 0
        try:
            for piece in template.generate(variables):
                num_chars += len(piece)
                _check_size(num_chars)
                pieces.append(piece)
        finally:
            self._current.meter = None
        return "".join(pieces)

    def count_round(self) -> str:
        """Called by compiled templates, in every round of a loop and by every macro."""
        meter: Meter | None = getattr(self._current, "meter", None)
        if meter is not None:
            meter.count()
        return ""

    def concat_texts(self, *values: Any) -> str:
        """The operator ``~``."""
        check_nesting(values)
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make something large of something small."""
        match operator:
            case "+":
                _check_size(_size(left) + _size(right))
            case "*":
                _check_size(max(_size(left) * _number(right), _size(right) * _number(left)))
                _check_number(_number(left) * _number(right), MAX_NUMBER**2)
            case "**":
                _check_number(_number(left) ** min(_number(right), 64), MAX_NUMBER**2)
            case "%" if isinstance(left, str):
                _check_format(left)
                check_nesting(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as the parent's
        if getattr(__obj, "__func__", None) is BoundedEnvironment.count_round:
            return __self.count_round()  # far the most frequent: not asked whether it is safe
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja puts a function of its own in front of str.format
        _check_call(getattr(method, "__self__", None), getattr(method, "__name__", ""), [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **kwargs)


class _Metering(NodeTransformer):
    """Puts the meter into loops and macros, and ``~`` under its eyes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._metered(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._metered(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._metered(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call_of("concat_texts", node.nodes, node.lineno)

    def _metered(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call_of("count_round", [], node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call_of(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    # An attribute of the environment, which no variable of a template can take the place of.
    return nodes.Call(nodes.EnvironmentAttribute(method, lineno=line), arguments, [], None, None, lineno=line)


def _finalized(value: Any) -> Any:
    """What an expression puts out."""
    if isinstance(value, list | tuple | Mapping):
        check_nesting(value)
    return value


def _bounded_filter(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # The first is the value, or Jinja's context of it.
        num_before = 1 + hasattr(own, "jinja_pass_arg")
        check_nesting(args[num_before - 1])
        value = args[num_before - 1] if isinstance(args[num_before - 1], str | list | tuple) else ""
        _check_call(value, own.__name__.removeprefix("do_"), [*args[num_before:], *kwargs.values()])
        return own(*args, **kwargs)

    return bounded


def _check_call(value: Any, name: str, arguments: Sequence[Any]) -> None:
    """Of methods of texts and filters: no large numbers, nothing that multiplies what is long."""
    if not isinstance(value, str | list | tuple):
        return
    for argument in arguments:
        _check_number(_number(argument), MAX_NUMBER)
        check_nesting(argument)
    texts = [argument for argument in arguments if isinstance(argument, str | list | tuple)]
    match name:
        case "format" | "format_map":
            _check_format(value)
        case "replace" if len(texts) > 1:
            _check_size(_size(value) + (_size(value) // max(1, _size(texts[0])) + 1) * _size(texts[1]))
        case "join":  # of a text that stands between, or as a filter the other way round
            longest = max([_size(text) for text in texts], default=0)
            between, num = (longest, len(value)) if isinstance(value, list | tuple) else (len(value), longest)
            _check_size(_size(value) + longest + num * between)
        case "expandtabs":
            _check_size(_size(value) * max(map(_number, arguments), default=8))


def check_nesting(value: Any) -> None:
    """Lists may hold the same list many times over, and be of any length once written down. Raises LimitError."""
    num_seen, waiting = 0, [value]
    while waiting:
        own = waiting.pop()
        if isinstance(own, Mapping):
            waiting += own.values()
        elif isinstance(own, list | tuple):
            waiting += own
        num_seen += 1
        if num_seen > MAX_ROUNDS:
            raise LimitError(f"a list or mapping of more than {MAX_ROUNDS:,} values")


def _check_format(value: Any) -> None:
    """A width in a format makes a text of any length."""
    digits = "".join(character if character in "0123456789" else " " for character in str(value))
    for number in digits.split():
        _check_number(int(number[:10]), MAX_NUMBER)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_TEXT_CHARS:
        raise LimitError(f"a text of more than {MAX_TEXT_CHARS:,} characters")


def _check_number(number: int, most: int) -> None:
    if number > most:
        raise LimitError(f"a number beyond {most:,}")


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):
        return len(value) + sum(len(own) for own in value if isinstance(own, str))
    return 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0
