"""Jinja in a sandbox, with limits on what a template may loop, call and write. Knows no rows and no tokens."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantpipe.errors import DataError

# Of one rendering: turns of loops and calls together; characters written.
MAX_STEPS = 200_000
MAX_CHARS = 16 << 20
STEPS_LIMIT = f"more than {MAX_STEPS:,} turns of loops and calls"
CHARS_LIMIT = f"more than {MAX_CHARS:,} characters"
DEPTH_LIMIT = "macros that call themselves too deeply"
PRODUCT_LIMIT = "'**', or '*' of something else than two numbers"
LIMITS = "\n".join((STEPS_LIMIT, CHARS_LIMIT, DEPTH_LIMIT, PRODUCT_LIMIT))
# What expressions in a template raise, beside its own errors.
OPERATOR_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class LimitError(TemplateError):
    """A template that loops, calls or writes without end."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Counts the turns of every loop, and every call, of one rendering."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        self.num_steps = 0
        self.filters["counted"] = self.counted
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]  # text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for statement in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
            for other in tree.find_all(statement):
                raise TemplateSyntaxError("other files cannot be included", other.lineno, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None)
        return tree.set_environment(self)  # type: ignore[return-value]  # it returns the tree itself

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.step()
            yield item

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise LimitError(STEPS_LIMIT)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.step()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Products of numbers only, and no powers: others can be of any size."""
        if operator != "*" or not all(isinstance(value, (int, float)) for value in (left, right)):
            raise LimitError(PRODUCT_LIMIT)
        return super().call_binop(context, operator, left, right)


class SandboxedTemplate:
    """A compiled template; ``variables`` are the names that it expects from outside."""

    def __init__(self, text: str, where: str) -> None:
        """Raises DataError, beginning with ``where``, for a text that is no template."""
        self._sandbox = _Sandbox()
        try:
            used = _variables_from_outside(self._sandbox.parse(text))
            self._template = self._sandbox.from_string(text)
        except TemplateSyntaxError as error:
            raise DataError(f"{where}:{error.lineno}: not a Jinja template: {error.message}; correct it") from None
        except RecursionError:
            raise DataError(f"{where}: nested too deeply; simplify the template") from None
        self.variables = frozenset(used - set(self._sandbox.globals))

    def render(self, values: Mapping[str, Any]) -> str:
        """The text it writes.

        Raises TemplateError where the template refuses the values or goes beyond a limit, and ``OPERATOR_ERRORS``.
        """
        self._sandbox.num_steps = 0
        pieces, num_chars = list[str](), 0
        try:
            for piece in self._template.generate(values):
                num_chars += len(piece)
                if num_chars > MAX_CHARS:
                    raise LimitError(CHARS_LIMIT)
                pieces.append(piece)
        except RecursionError as error:
            raise LimitError(DEPTH_LIMIT).with_traceback(error.__traceback__) from None
        return "".join(pieces)


def _variables_from_outside(tree: nodes.Template) -> set[str]:
    """Names that are used and never set: one that only some branch sets counts as set."""
    is_set = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    return meta.find_undeclared_variables(tree) - is_set


def _raise_exception(text: str) -> None:
    raise TemplateError(text)
