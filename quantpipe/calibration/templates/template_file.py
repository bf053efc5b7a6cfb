"""A template of the user's own: Jinja in a sandbox, with limits on what it may loop, call and write. Knows no tokens.

A template sees only what ``VARIABLES`` names, never other columns of a row.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quantpipe.calibration.rows import Message
from quantpipe.errors import DataError

VARIABLES = ("messages", "system", "prompt", "response", "text", "bos_token", "eos_token")
MAX_FILE_BYTES = 1 << 20
# Of one sample: turns of loops and calls together; characters written.
MAX_STEPS = 200_000
MAX_CHARS = 16 << 20
STEPS_LIMIT = f"more than {MAX_STEPS:,} turns of loops and calls"
CHARS_LIMIT = f"more than {MAX_CHARS:,} characters"
DEPTH_LIMIT = "macros that call themselves too deeply"
PRODUCT_LIMIT = "'**', or '*' of something else than two numbers"


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


class TemplateFile:
    """A template that was read and compiled."""

    def __init__(self, file: Path) -> None:
        """Raises DataError where the file cannot be read, is no template, or uses a variable that there is not."""
        self.file = file
        self.text = _read(file)
        self.limits = "\n".join((STEPS_LIMIT, CHARS_LIMIT, DEPTH_LIMIT, PRODUCT_LIMIT))
        self._sandbox = _Sandbox()
        try:
            used = _variables_from_outside(self._sandbox.parse(self.text))
            self._template = self._sandbox.from_string(self.text)
        except TemplateSyntaxError as error:
            raise DataError(f"{file}:{error.lineno}: not a Jinja template: {error.message}; correct it") from None
        except RecursionError:
            raise DataError(f"{file}: nested too deeply; simplify the template") from None
        unknown = sorted(used - {*VARIABLES, *self._sandbox.globals})
        if unknown:
            raise DataError(f"{file}: unknown variable {unknown[0]!r}; there are: {', '.join(VARIABLES)}")

    def render(self, content: str | tuple[Message, ...], bos_token: str | None, eos_token: str | None) -> str:
        """The sample as text. ``system``, ``prompt`` and ``response`` are the first of each role; the absent are none.

        Raises TemplateError where the template refuses the sample or goes beyond a limit, and what its expressions
        raise: TypeError, ValueError, LookupError, AttributeError.
        """
        messages = [] if isinstance(content, str) else list(content)
        said = {message["role"]: message["content"] for message in reversed(messages)}
        self._sandbox.num_steps = 0
        pieces, num_chars = list[str](), 0
        try:
            for piece in self._template.generate(
                messages=messages or None,
                system=said.get("system"),
                prompt=said.get("user"),
                response=said.get("assistant"),
                text=content if isinstance(content, str) else None,
                bos_token=bos_token or "",
                eos_token=eos_token or "",
            ):
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


def _read(file: Path) -> str:
    try:
        stored = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {(error.strerror or str(error)).lower()}; give the path of a Jinja file") from error
    if len(stored) > MAX_FILE_BYTES:
        text = f"{len(stored):,} bytes, a template has at most {MAX_FILE_BYTES:,}; give the path of a Jinja file"
        raise DataError(f"{file}: {text}")
    try:
        return stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: byte {error.start + 1} is not UTF-8; save the template as UTF-8") from None


def _raise_exception(text: str) -> None:
    raise TemplateError(text)
