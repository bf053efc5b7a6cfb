"""What a calibration set is made of: ``set.yaml`` as strict frozen data. Reads no samples.

The docstrings under the fields are the reference of the file format.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quantpipe.errors import DataError, RecipeError, suggest
from quantpipe.recipe.document import KeyPath, Problem, describe, read_document
from quantpipe.recipe.explain import explain

SET_NAME = "set.yaml"
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


class Part(BaseModel):
    """What every part of a set definition has in common."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True)


class Fields(Part):
    """Which fields of a row hold the sample: ``text``, or ``messages``, or ``prompt`` and ``response``."""

    text: Text | None = None
    """Field with plain text."""
    messages: Text | None = None
    """Field with a conversation: a list of mappings."""
    prompt: Text | None = None
    """Field with what the user says; needs `response`."""
    response: Text | None = None
    """Field with what the model should answer; needs `prompt`."""
    role: Text = "role"
    """Key of a message that holds who speaks: system, user, assistant or tool."""
    content: Text = "content"
    """Key of a message that holds what is said."""

    @model_validator(mode="after")
    def _one_form(self) -> "Fields":
        given = [key for key in ("text", "messages", "prompt", "response") if getattr(self, key) is not None]
        if given not in (["text"], ["messages"], ["prompt", "response"]):
            found = " and ".join(given) or "none of them"
            raise ValueError(f"found {found}; allowed: text, or messages, or prompt with response")
        return self

    @property
    def is_conversation(self) -> bool:
        """Whether the sample is a list of messages, which only a chat template turns into text."""
        return self.messages is not None


class JsonlSource(Part):
    """Rows of a JSON Lines file."""

    kind: Literal["jsonl"]
    """`jsonl`."""
    name: Text | None = None
    """What the account calls this source. Absent: the file's name."""
    path: Text
    """The file, relative to the set's folder, or absolute."""
    fields: Fields
    """Which fields of a row hold the sample."""
    template: Literal["none", "tokenizer"] | None = None
    """`tokenizer`: the tokenizer's chat template makes the text; `none`: the text as it is, a prompt and its response
    joined by a line break. Absent: `none` for text, `tokenizer` otherwise."""

    @model_validator(mode="after")
    def _template_fits(self) -> "JsonlSource":
        if self.template == "none" and self.fields.is_conversation:
            raise ValueError("template none cannot render messages; use template: tokenizer")
        if self.template == "tokenizer" and self.fields.text is not None:
            raise ValueError("template tokenizer needs messages, or prompt and response; use template: none for text")
        return self

    @property
    def label(self) -> str:
        return self.name or Path(self.path).name

    @property
    def uses_template(self) -> bool:
        """Whether samples go through the tokenizer's chat template."""
        return self.fields.text is None and self.template != "none"


class PythonStdlibSource(Part):
    """Text that comes with the running Python: its library's modules, or the topics of its reference manual."""

    kind: Literal["python_stdlib"]
    """`python_stdlib`."""
    name: Text | None = None
    """What the account calls this source. Absent: what `content` says."""
    content: Literal["modules", "topics"]
    """`modules`: source code of the standard library; `topics`: the reference texts of `pydoc_data.topics`."""
    exclude: Texts = ()
    """Modules (with everything below them) or topics that are left out."""
    chunk_chars: Annotated[int, Field(ge=100)] = 1500
    """A module or topic is cut at blank lines into samples of at most about this many characters."""
    chunks_per_name: Annotated[int, Field(ge=1)] = 4
    """Most samples taken from one module or topic, evenly spaced over it."""

    @property
    def label(self) -> str:
        return self.name or self.content

    @property
    def uses_template(self) -> bool:
        return False


Source = JsonlSource | PythonStdlibSource
KINDS: dict[str, type[JsonlSource] | type[PythonStdlibSource]] = {
    "jsonl": JsonlSource,
    "python_stdlib": PythonStdlibSource,
}


class Header(Part):
    """The top of ``set.yaml``."""

    version: Literal[1]
    """Version of the file format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the set: letters, digits, `.`, `_` and `-`."""
    description: str = ""
    """What the set is, for people."""
    languages: Texts = ()
    """Codes of the languages in it, for people."""
    license: str = ""
    """SPDX name of the licence, for people."""
    sources: Annotated[tuple[Any, ...], Field(strict=False, min_length=1)]
    """Where samples come from. Each has a `kind`."""


@dataclass(frozen=True)
class SetDefinition:
    """A checked ``set.yaml``; ``folder`` is what the sources' paths are relative to."""

    folder: Path
    header: Header
    sources: tuple[Source, ...]

    @property
    def name(self) -> str:
        return self.header.name

    @property
    def file(self) -> Path:
        return self.folder / SET_NAME


def load_set(folder: Path) -> SetDefinition:
    """Read and check ``set.yaml``.

    Raises DataError where there is none, and RecipeError listing every problem in it as ``file:line:column: key: ...``.
    """
    file = folder / SET_NAME
    if not file.is_file():
        raise DataError(f"{folder}: holds no {SET_NAME}; a calibration set is a folder with a {SET_NAME}")
    document = read_document(file, "calibration set")
    problems, header = list(document.problems), None
    try:
        header = Header.model_validate(document.data)
    except ValidationError as error:
        problems += [explain(detail, Header) for detail in error.errors(include_url=False)]
    written = document.data.get("sources")
    sources = list(_sources(written if isinstance(written, list) else [], problems))
    problems += _repeated_labels(sources)
    if problems or header is None:
        raise RecipeError("\n".join(document.render(problems)))
    return SetDefinition(folder, header, tuple(sources))


def _sources(written: list[Any], problems: list[Problem]) -> Iterable[Source]:
    for index, value in enumerate(written):
        path: KeyPath = ("sources", index)
        if not isinstance(value, dict):
            problems.append(Problem(path, f"found {describe(value)}; allowed: a mapping with a kind"))
        elif "kind" not in value:
            problems.append(Problem(path, f"missing key 'kind' (known: {', '.join(sorted(KINDS))})"))
        elif not isinstance(value["kind"], str) or value["kind"] not in KINDS:
            text = f"unknown kind {str(value['kind'])!r}{suggest(str(value['kind']), KINDS)}"
            problems.append(Problem((*path, "kind"), text))
        else:
            model = KINDS[value["kind"]]
            try:
                yield model.model_validate(value)
            except ValidationError as error:
                problems += [_below(path, explain(detail, model)) for detail in error.errors(include_url=False)]


def _below(path: KeyPath, problem: Problem) -> Problem:
    """A problem of one part as a problem of the whole file, where that part lies at ``path``."""
    shown = None if problem.shown is None else (*path, *problem.shown)
    return replace(problem, path=(*path, *problem.path), shown=shown)


def _repeated_labels(sources: list[Source]) -> list[Problem]:
    labels = [source.label for source in sources]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    return [Problem(("sources",), f"two sources are called {label!r}; give one another name") for label in twice]
