"""A task of the short form, read and checked: rows of a file as items, and examples. Knows no model.

Every fault is a DataError of one line that begins with the place: in the suite file, or ``file:row``.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError

from quantpipe.calibration.definition.mapping import Fields, canonical
from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.readers import read_rows
from quantpipe.calibration.readers.values import ABSENT, kind_of, lookup
from quantpipe.calibration.rows import Row, RowProblems, SourceReading
from quantpipe.calibration.templates.sandbox import OPERATOR_ERRORS, SandboxedTemplate
from quantpipe.errors import DataError, suggest
from quantpipe.evaluate.kinds.kind import ANSWER, DOMAIN, ID, TARGET, Item, Kind, Scorer, TaskKeys, text_of

FEWEST_ITEMS = 2  # one item says nothing about a loss
NO_VALUE = "(none)"  # what a slice is called whose field is empty
Place = Callable[[str], str]


@dataclass(frozen=True)
class Shot:
    """An example: a question as it is asked, and its answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class ShortTask:
    """One task. ``files`` are the digests of other files that scores depend on; ``place`` begins errors about keys."""

    kind: Kind
    keys: TaskKeys
    scorer: Scorer
    items: tuple[Item, ...]
    shots: tuple[Shot, ...]
    files: tuple[str, ...]
    place: Place

    @property
    def name(self) -> str:
        return self.keys.name

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(item.id for item in self.items)

    @property
    def item_slices(self) -> tuple[Mapping[str, str], ...]:
        """The slices that each item belongs to."""
        return tuple(item.slices for item in self.items)

    @property
    def content(self) -> Any:
        """All that a result depends on, as plain data; where the files lie does not count."""
        items = [[i.id, i.prompt, i.target, i.fields, i.choices, i.cluster, i.domain, i.slices] for i in self.items]
        shots = [[shot.prompt, shot.answer] for shot in self.shots]
        return [self.keys.model_dump(mode="json", exclude={"file"}, warnings=False), items, shots, self.files]

    @property
    def asked(self) -> Any:
        """Of ``content``, what the model is given: it decides whether saved answers can be scored again."""
        names = {"chat", "system", "answer_prefix", "max_tokens", "stop"}
        keys = self.keys.model_dump(mode="json", include=names, warnings=False)
        shots = [[shot.prompt, shot.answer] for shot in self.shots]
        return [self.kind.asks, keys, [[i.id, i.prompt, i.choices] for i in self.items], shots]


def read_short_task(keys: TaskKeys, kind: Kind, folder: Path, place: Place) -> ShortTask:
    """Read the task's rows and check each of them."""
    prompt = SandboxedTemplate(keys.prompt, place("prompt"))
    scorer = kind.open(keys, folder, place)
    names = _names(keys, prompt)
    _check_map(keys, names, place)
    rows = _rows(keys, keys.file, names, folder, place("file"))
    shots, rows = _shots(keys, prompt, names, rows, folder, place)
    rows = _chosen(keys, rows, place)
    items = tuple(_item(row, keys, prompt, scorer) for row in rows)
    _require_unique(items)
    if len(items) < FEWEST_ITEMS:
        found = "no row" if not items else "one item"
        text = f"{folder / keys.file} gives {found}; at least {FEWEST_ITEMS} are needed to compare models"
        raise DataError(f"{place('file')}: {text}")
    files = tuple(hashlib.sha256((folder / each).read_bytes()).hexdigest() for each in keys.other_files())
    return ShortTask(kind, keys, scorer, items, shots, files, place)


def _names(keys: TaskKeys, prompt: SandboxedTemplate) -> tuple[str, ...]:
    """Every field of a row that is used, by our name for it."""
    optional = [name for name in (TARGET, ANSWER, DOMAIN) if name in keys.map]
    cluster = [keys.cluster] if keys.cluster else []
    names = (ID, *keys.item_fields(), *sorted(prompt.variables), *keys.slices, *cluster, *optional)
    return tuple(dict.fromkeys(names))


def _check_map(keys: TaskKeys, names: Sequence[str], place: Place) -> None:
    for name in keys.map:
        if name not in names:
            raise DataError(f"{place('map')}: nothing uses a field {name!r}{suggest(name, names)}")


def _rows(keys: TaskKeys, file: str, names: Sequence[str], folder: Path, where: str) -> list[Row]:
    """The rows of a file with the used fields, by our names."""
    columns = tuple(dict.fromkeys(keys.map.get(name, name) for name in names))
    try:
        source = FileSource(path=file, fields=Fields(text=columns), encoding=(keys.encoding,), delimiter=keys.delimiter)
    except ValidationError as error:
        reason = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        if "a text file has one field" in reason:
            reason = "a text file has no columns; give a csv, tsv, jsonl, json or parquet file"
        raise DataError(f"{where}: {reason}") from None
    problems = RowProblems()
    try:
        found = list(read_rows(source, folder, problems, SourceReading()))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    problems.raise_if_any()
    return [Row(row.where, _by_our_names(row, keys, names)) for row in found]


def _by_our_names(row: Row, keys: TaskKeys, names: Sequence[str]) -> dict[str, Any]:
    fields = {name: lookup(row.values, keys.map.get(name, name)) for name in names}
    missing = next((name for name, value in fields.items() if value is ABSENT), None)
    if missing is not None:
        raise DataError(f"{row.where}: the row has no field {keys.map.get(missing, missing)!r}")
    return fields


def _shots(
    keys: TaskKeys, prompt: SandboxedTemplate, names: Sequence[str], rows: list[Row], folder: Path, place: Place
) -> tuple[tuple[Shot, ...], list[Row]]:
    """The examples, and the rows that are left for items."""
    few = keys.few_shot
    if few is None:
        return (), rows
    pool = rows if few.file is None else _rows(keys, few.file, names, folder, place("few_shot"))
    if few.num > len(pool):
        raise DataError(f"{place('few_shot')}: num {few.num}, and there are {len(pool)} rows to take examples from")
    chosen = random.Random(few.seed).sample(range(len(pool)), few.num)
    shots = tuple(_shot(pool[i], keys, prompt) for i in chosen)
    return shots, rows if few.file is not None else [row for i, row in enumerate(rows) if i not in chosen]


def _shot(row: Row, keys: TaskKeys, prompt: SandboxedTemplate) -> Shot:
    try:
        if ANSWER in keys.map:
            answer = text_of(row.values[ANSWER])
        else:
            choices, target = keys.choices_of(row.values), row.values.get(TARGET)
            is_place = isinstance(target, int) and not isinstance(target, bool) and 0 <= target < len(choices)
            answer = choices[target] if is_place else keys.shot_answer(target)  # type: ignore[index]  # is_place says so
        return Shot(_rendered(prompt, row.values), answer)
    except ValueError as error:
        raise DataError(f"{row.where}: the example: {error}") from None


def _chosen(keys: TaskKeys, rows: list[Row], place: Place) -> list[Row]:
    if keys.num_items is None:
        return rows
    if keys.num_items > len(rows):
        raise DataError(f"{place('num_items')}: {keys.num_items} items, and there are {len(rows)} rows for them")
    return [rows[i] for i in sorted(random.Random(keys.seed).sample(range(len(rows)), keys.num_items))]


def _item(row: Row, keys: TaskKeys, prompt: SandboxedTemplate, scorer: Scorer) -> Item:
    fields, where = row.values, row.where
    try:
        item_id = text_of(fields[ID])
    except ValueError as error:
        raise DataError(f"{where}: field {keys.map.get(ID, ID)!r}, the id: {error}") from None
    try:
        item = Item(
            id=item_id,
            where=where,
            prompt=_rendered(prompt, fields),
            target=fields.get(TARGET),
            fields=fields,
            choices=keys.choices_of(fields),
            cluster=item_id if keys.cluster is None else text_of(fields[keys.cluster]),
            domain=canonical(fields.get(DOMAIN)) or keys.name,
            slices={name: _slice(fields[name], name) for name in keys.slices},
        )
        scorer.check(item)
    except ValueError as error:
        raise DataError(f"{where}: item {item_id!r}: {error}") from None
    return item


def _slice(value: Any, name: str) -> str:
    if isinstance(value, (list, tuple, dict)):
        raise ValueError(f"field {name!r} is a slice and holds {kind_of(value)}; one value belongs there")
    return canonical(value) or NO_VALUE


def _rendered(prompt: SandboxedTemplate, fields: Mapping[str, Any]) -> str:
    """The question. ValueError where the template refuses the row or writes nothing."""
    try:
        text = prompt.render({name: "" if value is None else value for name, value in fields.items()})
    except (TemplateError, *OPERATOR_ERRORS) as error:
        raise ValueError(f"the prompt cannot be rendered: {' '.join(str(error).split())}") from None
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _require_unique(items: Sequence[Item]) -> None:
    first: dict[str, Item] = {}
    for item in items:
        if item.id in first:
            raise DataError(f"{item.where}: item {item.id!r} is there twice, first at {first[item.id].where}")
        first[item.id] = item
