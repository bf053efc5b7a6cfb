"""What a suite file may say, as strict frozen data: lm-eval tasks beside it, lm-eval's own, and the short form.

Reads no items. The docstrings under the fields are the reference of the file format.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, WithJsonSchema

from quantpipe.calibration.definition.mapping import Text, Texts
from quantpipe.errors import DataError, RecipeError, suggest
from quantpipe.evaluate.eval_task import ItemMetric
from quantpipe.evaluate.kinds.kind import TaskKeys
from quantpipe.evaluate.kinds.table import KINDS
from quantpipe.recipe.document import Document, KeyPath, Problem, describe, independent, read_document
from quantpipe.recipe.explain import explain
from quantpipe.recipe.section import Count, Section, Seed

SUITE_NAME = "suite.yaml"


_MAPPINGS = WithJsonSchema({"type": "array", "items": {"type": "object"}})


class SuiteHeader(Section):
    """The top of a suite file."""

    version: Literal[1]
    """Version of the file format."""
    name: Text
    """Name of the suite in reports."""
    tasks: Annotated[tuple[Any, ...], Field(strict=False, min_length=1), _MAPPINGS]
    """The tasks. Each has a `kind` (the short form), a `task` (an lm-eval file beside this one) or an `lm_eval`."""


class LocalTask(Section):
    """An lm-eval task whose YAML file and JSON Lines items lie in the suite's folder."""

    task: Text
    """Its name in the lm-eval file."""
    metric: ItemMetric
    """Which metric of its list says whether an item is right."""
    num_items: Count
    """How many items there must be."""
    slices: Texts = ()
    """Fields of the items by which results are also shown and judged, beside `domain`."""


class OwnTask(Section):
    """One of the tasks that come with lm-eval, by name; its data are downloaded from the Hugging Face hub."""

    lm_eval: Text
    """Its name, such as `arc_easy`."""
    metric: ItemMetric
    """Which metric of its list says whether an item is right."""
    split: Literal["test", "validation"] = "test"
    """Which split is asked; `validation` for tasks without a test split."""
    num_items: Count | None = None
    """How many items are asked, chosen by `seed`. Absent: all."""
    seed: Seed = 0
    """Which items are chosen."""


Entry = LocalTask | OwnTask | TaskKeys
# A task has one of these keys: it says what it is.
_BY_KEY: dict[str, type[LocalTask] | type[OwnTask]] = {"task": LocalTask, "lm_eval": OwnTask}


@dataclass(frozen=True)
class SuiteFile:
    """A checked file. ``folder`` is what its paths are relative to."""

    file: Path
    name: str
    entries: tuple[Entry, ...]
    document: Document

    @property
    def folder(self) -> Path:
        return self.file.parent

    def place(self, index: int) -> Callable[[str], str]:
        """What begins an error about a key of the task with this index: ``file:line:column: tasks[0].key``."""

        def begin(key: str) -> str:
            path: KeyPath = ("tasks", index, key)
            return f"{self.document.place_of(Problem(path, ''))}: tasks[{index}].{key}"

        return begin


def read_suite_file(path: Path) -> SuiteFile:
    """Read a suite, given as its file or as a folder with a ``suite.yaml``.

    DataError listing every problem as ``file:line:column: key: ...``.
    """
    file = path if path.suffix in (".yaml", ".yml") and not path.is_dir() else path / SUITE_NAME
    try:
        document = read_document(file, "suite")
        return _checked(file, document)
    except RecipeError as error:
        raise DataError(str(error)) from error


def _checked(file: Path, document: Document) -> SuiteFile:
    problems: list[Problem] = []
    header = None
    try:
        header = SuiteHeader.model_validate(document.data)
    except ValidationError as error:
        problems += [explain(detail, SuiteHeader) for detail in error.errors(include_url=False)]
    written = document.data.get("tasks")
    entries = tuple(_entries(written if isinstance(written, list) else [], problems))
    problems = independent(document.problems, problems)
    if problems or header is None:
        raise DataError("\n".join(document.render(problems)))
    return SuiteFile(file, header.name, entries, document)


def _entries(written: list[Any], problems: list[Problem]) -> Iterator[Entry]:
    """The tasks that are legal; the problems of the others are added."""
    for index, value in enumerate(written):
        here: KeyPath = ("tasks", index)
        found = _section_of(value)
        if isinstance(found, Problem):
            problems.append(found.below(here))
            continue
        try:
            yield found.model_validate(value)
        except ValidationError as error:
            problems += [explain(detail, found).below(here) for detail in error.errors(include_url=False)]


def _section_of(value: Any) -> type[LocalTask] | type[OwnTask] | type[TaskKeys] | Problem:
    """What a task is, by the keys that it has."""
    if not isinstance(value, dict):
        return Problem((), f"found {describe(value)}; allowed: a mapping with a kind, a task or an lm_eval")
    kind = value.get("kind")
    if "kind" in value:
        if not isinstance(kind, str) or kind not in KINDS:
            return Problem(("kind",), f"unknown kind {str(kind)!r}{suggest(str(kind), KINDS)}")
        return KINDS[kind].keys
    for key, section in _BY_KEY.items():
        if key in value:
            return section
    known = ("kind", *_BY_KEY)
    meant = next((f"; did you mean {key!r}?" for key in known for other in value if _is_near(other, key)), "")
    return Problem((), f"missing: a kind, a task, or an lm_eval{meant} (kinds: {', '.join(sorted(KINDS))})")


def _is_near(found: str, key: str) -> bool:
    return "did you mean" in suggest(found, (key,))
