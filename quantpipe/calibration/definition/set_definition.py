"""What a calibration set is made of: ``set.yaml``, or the same keys inside a recipe, as strict frozen data.

Reads no samples. The docstrings under the fields are the reference of the file format.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, field_validator

from quantpipe.calibration.definition.mapping import Texts
from quantpipe.calibration.definition.sources import AUTO, KINDS, RowKeys, Source
from quantpipe.calibration.redaction.section import RedactSection
from quantpipe.errors import DataError, nearest, suggest
from quantpipe.recipe.document import Document, KeyPath, Problem, describe, independent, read_document, refusal
from quantpipe.recipe.explain import explain
from quantpipe.recipe.schema import Recipe
from quantpipe.recipe.section import Section

SET_NAME = "set.yaml"
MANIFEST_NAME = "calibration.manifest.json"
OFF = "off"
# A source without a `kind` that has this key is of this kind.
KIND_BY_KEY = {"path": "file", "dataset": "dataset"}


_NUMBER_OR_OFF = WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"const": OFF}]})


def _off_as_none(value: Any) -> Any:
    if value == OFF:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"found {describe(value)}; allowed: a number above 0, at most 1, or off")
    return float(value)


class Holdout(Section):
    """The share of the rows that is kept out of calibration, for evaluation."""

    frac: Annotated[float, Field(gt=0, lt=1)]
    """Share of the groups, or of the rows where there is no group."""
    salt: str = ""
    """Any text; another one keeps out another share."""


class Header(Section):
    """The top of ``set.yaml``."""

    version: Literal[1]
    """Version of the file format."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Name of the set: letters, digits, `.`, `_` and `-`."""
    description: str = ""
    """What the set is, for people."""
    languages: Texts = ()
    """Codes of the languages in it; `language: auto` chooses among them."""
    license: str = ""
    """SPDX name of the licence, for people."""
    stratify: Annotated[tuple[Literal["language", "length", "domain"], ...], Field(strict=False)] = ()
    """A source's tokens are spread over strata: rows of one language, of similar length, of one domain."""
    allocation: Literal["proportional", "equal"] = "proportional"
    """How much each stratum of a source gives: in proportion to what it holds, or as much as any other."""
    packing: Literal["concatenate", "separate", "truncate"] = "concatenate"
    """`concatenate`: rows end to end with an EOS after each, attention crosses; `separate`: the same, but no attention
    from one row to another; `truncate`: one row in each sequence, cut at its length; shorter rows are not used."""
    near_duplicates: Annotated[float | None, BeforeValidator(_off_as_none), _NUMBER_OR_OFF] = 0.8
    """Jaccard similarity of two rows' words from which the later is dropped; `off` drops exact duplicates only."""
    holdout: Holdout | None = None
    """Share of groups or rows kept out of calibration. Absent: none."""
    redact: RedactSection = RedactSection()
    """What is replaced by placeholders in every row. Absent: all built-in rules; `off`: nothing."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Rows that cannot be used: `refuse` the set and name them, or `drop` them and count the reasons."""
    sources: Annotated[tuple[Any, ...], Field(strict=False, min_length=1)]
    """Where samples come from. Each has a `path`, a `dataset` or a `kind`."""

    @field_validator("stratify")
    @classmethod
    def _each_once(cls, stratify: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(stratify)) < len(stratify):
            raise ValueError("found one more than once; list each once")
        return stratify


@dataclass(frozen=True)
class SetDefinition:
    """A checked set. ``folder`` is what the sources' paths are relative to, ``file`` where the set is written.

    ``place`` (``file:line:column``) is where its sources are written, ``places`` where the path of each is.
    """

    folder: Path
    file: Path
    header: Header
    sources: tuple[Source, ...]
    place: str
    places: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.header.name


def load_set(path: Path) -> SetDefinition:
    """Read and check a ``set.yaml``, given as the file or its folder.

    Raises DataError where there is none, and RecipeError listing every problem in it as ``file:line:column: key: ...``.
    """
    file = path if path.suffix in (".yaml", ".yml") and not path.is_dir() else path / SET_NAME
    if not file.is_file():
        raise DataError(f"{path}: holds no {SET_NAME}; a calibration set is a folder with a {SET_NAME}")
    document = read_document(file, "calibration set")
    return set_from(document.data, file.parent, document)


def set_of_recipe(recipe: Recipe) -> SetDefinition | Path:
    """The set that a recipe names or holds, checked; the folder itself where its blocks were built before.

    Raises what ``load_set`` raises; DataError for a recipe without calibration.
    """
    section = recipe.calibration
    if section is None:
        raise DataError(f"{recipe.name}: the recipe has no calibration section; add one with a set")
    if isinstance(section.set, dict):
        data = {"version": 1, "name": recipe.name, **section.set}
        document = recipe.document or Document(recipe.name, "")
        return set_from(data, recipe.folder, document, ("calibration", "set"))
    return set_in(section.set)


def set_in(path: Path) -> SetDefinition | Path:
    """The set in a folder or file, checked; the folder itself where it holds blocks that were built before."""
    is_built = not path.is_file() and not (path / SET_NAME).is_file()
    return path if is_built and (path / MANIFEST_NAME).is_file() else load_set(path)


def set_from(data: Mapping[str, Any], folder: Path, document: Document, path: KeyPath = ()) -> SetDefinition:
    """Check a set that stands at ``path`` of ``document``; ``folder`` is what its paths are relative to.

    Raises RecipeError listing every problem as ``file:line:column: key: ...``; DataError where only files lack.
    """
    problems: list[Problem] = []
    header = None
    try:
        header = Header.model_validate(dict(data))
    except ValidationError as error:
        problems += [explain(detail, Header).below(path) for detail in error.errors(include_url=False)]
    written = data.get("sources")
    sources = dict(_sources(written if isinstance(written, list) else [], path, folder, problems))
    problems += [problem.below(path) for problem in _conflicts(header, sources, folder)]
    problems = independent([] if path else document.problems, problems)
    if problems or header is None:
        raise refusal(document, problems)
    here: KeyPath = (*path, "sources")
    place = str(document.place_of(Problem(here, "", at_key=True)))
    places = [document.place_of(Problem((*here, index, "path"), "")) for index in sources]
    return SetDefinition(folder, Path(document.name), header, tuple(sources.values()), place, tuple(map(str, places)))


def _sources(written: list[Any], path: KeyPath, folder: Path, problems: list[Problem]) -> Iterator[tuple[int, Source]]:
    """The sources that are legal, by their index; the problems of the others are added."""
    for index, value in enumerate(written):
        here: KeyPath = (*path, "sources", index)
        if not isinstance(value, dict):
            problems.append(Problem(here, f"found {describe(value)}; allowed: a mapping with a path, dataset or kind"))
            continue
        keys = _with_kind(value)
        kind = keys.get("kind")
        if kind is None:
            problems += _without_kind(value, here)
        elif not isinstance(kind, str) or kind not in KINDS:
            problems.append(Problem((*here, "kind"), f"unknown kind {str(kind)!r}{suggest(str(kind), KINDS)}"))
        elif kind == "file" and isinstance(keys.get("path"), str) and (folder / keys["path"]).is_dir():
            text = (
                f"{folder / keys['path']} is a folder; give a file, or a pattern such as {keys['path'].rstrip('/')}/*"
            )
            problems.append(Problem((*here, "path"), text, is_data=True))
        else:
            try:
                yield index, KINDS[kind].model_validate(keys)
            except ValidationError as error:
                problems += [explain(detail, KINDS[kind]).below(here) for detail in error.errors(include_url=False)]


def _without_kind(value: dict[str, Any], here: KeyPath) -> Iterator[Problem]:
    """A source that does not say what it is, mostly because the key that would is misspelt."""
    telling, known = ("kind", *KIND_BY_KEY), {name for model in KINDS.values() for name in model.model_fields}
    unknown = [key for key in value if key not in known]
    for key in unknown:
        meant = telling if nearest(key, telling) is not None else known
        yield Problem((*here, key), f"unknown key {key!r}{suggest(key, meant)}", at_key=True, shown=here)
    if all(nearest(key, telling) is None for key in unknown):
        yield Problem(here, f"missing: a path, a dataset, or a kind (known: {', '.join(sorted(KINDS))})")


def _with_kind(value: dict[str, Any]) -> dict[str, Any]:
    """A source's keys with the ``kind`` that others imply; ``jsonl`` is an older name for a file of that format."""
    if value.get("kind") == "jsonl":
        return {**value, "kind": "file", "format": "jsonl"}
    if "kind" in value:
        return value
    return next(({**value, "kind": kind} for key, kind in KIND_BY_KEY.items() if key in value), value)


def _conflicts(header: Header | None, sources: Mapping[int, Source], folder: Path) -> Iterator[Problem]:
    """What contradicts something else in the set, or its folder."""
    yield from _repeated_labels([source.label for source in sources.values()])
    yield from _weights(sources)
    for index, source in sources.items():
        if source.detects_language and header is not None and len(header.languages) < 2:
            text = f"{AUTO} chooses among the set's languages; list two or more there, or name the language here"
            yield Problem(("sources", index, "language"), text)
        if isinstance(source, RowKeys) and source.template_file is not None:
            yield from _template_file(index, source.template_file, folder)


def _repeated_labels(labels: list[str]) -> Iterable[Problem]:
    twice = sorted({label for label in labels if labels.count(label) > 1})
    return [Problem(("sources",), f"two sources are called {label!r}; give one another name") for label in twice]


def _weights(sources: Mapping[int, Source]) -> Iterator[Problem]:
    weights = {index: source.weight for index, source in sources.items() if source.weight is not None}
    if not weights:
        return
    for index in sorted(set(sources) - set(weights)):
        yield Problem(("sources", index), "missing: weight; other sources have one, so give it to all or to none")
    if len(weights) == len(sources) and sum(weights.values()) == 0:
        yield Problem(("sources", min(weights), "weight"), "all weights are 0; make one more than 0")


def _template_file(index: int, written: str, folder: Path) -> Iterator[Problem]:
    if not (folder / written).is_file():
        text = f"no file {folder / written}{suggest(written, ('none', 'tokenizer'))}, or the path of a Jinja file"
        is_data = nearest(written, ("none", "tokenizer")) is None
        yield Problem(("sources", index, "template"), text, is_data=is_data)
        return
    from quantpipe.calibration.templates.template_file import TemplateFile  # loads Jinja

    try:
        TemplateFile(folder / written)
    except DataError as error:
        yield Problem(("sources", index, "template"), str(error))
