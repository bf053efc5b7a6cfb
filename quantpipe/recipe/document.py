"""A YAML file as plain data that remembers where each key and value stands. Knows YAML, not what the keys mean.

Scalars follow YAML 1.2's core schema: ``no`` and ``on`` are text, ``1e-3`` is a number, dates stay text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from quantpipe.errors import DataError, RecipeError

KeyPath = tuple[str | int, ...]
# Stands for every index of a list in a path that is given to ``Document.expand``.
EACH = "*"

_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_PREFIXED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq"))


@dataclass(frozen=True, order=True)
class Place:
    """Where something was written: ``file:line:column``, or the ``--set`` option; sorts in reading order."""

    is_override: bool
    line: int
    column: int
    label: str

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class Problem:
    """Something wrong at ``path``: with its key (``at_key``) or with its value.

    ``place`` is where, if not where the document has ``path``; ``shown`` is the key path to print, if another.
    ``is_unread``: the value could not be read, so nothing else is known of it. ``meant``: the key that this may be a
    misspelling of. ``needs``: a part of the file that must be right for this to be said at all.
    ``is_data``: the file is right, and what it names is not there.
    """

    path: KeyPath
    text: str
    at_key: bool = False
    place: Place | None = None
    shown: KeyPath | None = None
    is_unread: bool = False
    meant: KeyPath | None = None
    needs: KeyPath | None = None
    is_data: bool = False

    def below(self, path: KeyPath) -> "Problem":
        """The same problem of the file in which what it was found in lies at ``path``."""
        shown, meant, needs = (None if own is None else (*path, *own) for own in (self.shown, self.meant, self.needs))
        return replace(self, path=(*path, *self.path), shown=shown, meant=meant, needs=needs)


@dataclass
class Document:
    """The data of one file, overridden or not, with the place of every key and value, and what was wrong with it."""

    name: str
    text: str
    data: Any = None
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def render(self, problems: Sequence[Problem]) -> list[str]:
        """One line per problem, ``place: key.path: text``, in the order a reader meets them."""
        located = [(problem.place or self.place_of(problem), problem) for problem in problems]
        located.sort(key=lambda pair: pair[0])
        return list(dict.fromkeys(_line(place, problem) for place, problem in located))

    def place_of(self, problem: Problem) -> Place:
        """The place of the problem's key or value, or of the nearest enclosing one that was written."""
        first, second = (self.keys, self.values) if problem.at_key else (self.values, self.keys)
        for length in range(len(problem.path), 0, -1):
            path = problem.path[:length]
            place = first.get(path) or second.get(path)
            if place is not None and length < len(problem.path):
                return self.keys.get(path, place)  # something absent is reported at the key of what should hold it
            if place is not None:
                return place
        return Place(False, 1, 1, f"{self.name}:1:1")

    def expand(self, path: KeyPath, key: str) -> None:
        """Replace text at ``path`` by the mapping ``{key: text}`` that it is short for; ``EACH`` is any index."""
        if EACH in path:
            before, after = path[: path.index(EACH)], path[path.index(EACH) + 1 :]
            items = value_at(self.data, before)
            for index in range(len(items) if isinstance(items, list) else 0):
                self.expand((*before, index, *after), key)
            return
        parent, value = value_at(self.data, path[:-1]), value_at(self.data, path)
        if isinstance(parent, (dict, list)) and isinstance(value, str):
            parent[path[-1]] = {key: value}  # type: ignore[index]  # the path led there
            self.keys[(*path, key)] = self.values[(*path, key)] = self.values[path]

    def override(self, option: str) -> None:
        """Apply one ``key.path=value``; the value is YAML. What cannot be applied is added to ``problems``."""
        path_text, equals, value_text = option.partition("=")
        path: KeyPath = tuple(part.strip() for part in path_text.split("."))
        place = Place(True, 0, 0, f"--set {path_text.strip()}")
        if not equals or not all(path):
            self._refuse(place, f"found {option!r}; write it as --set key.path=value")
            return
        value = Document(name="", text=value_text)
        try:
            value.data = _convert(yaml.compose(value_text, Loader=yaml.BaseLoader), (), value, set(), place)
        except (yaml.YAMLError, RecursionError) as error:
            self._refuse(place, f"the value is not valid YAML: {_first_line(error)}; quote it")
            return
        target = self._mapping_for(path, place)
        if target is None:
            return
        self._forget(path)
        target[path[-1]] = value.data
        self.keys[path] = place
        self.values |= {(*path, *inner): place for inner in value.values}
        self.keys |= {(*path, *inner): place for inner in value.keys}
        self.problems += [problem.below(path) for problem in value.problems]

    def _mapping_for(self, path: KeyPath, place: Place) -> dict[Any, Any] | None:
        """The mapping that holds the last key of ``path``, made where it was absent; None where it cannot be."""
        target = self.data
        for length in range(1, len(path)):
            part, name = path[length - 1], ".".join(str(part) for part in path[:length])
            if target.get(part) is None:
                target[part] = {}
                self.keys.setdefault(path[:length], place)
                self.values[path[:length]] = place
            target = target[part]
            if not isinstance(target, dict):
                kind = "a list" if isinstance(target, list) else "a single value"
                self._refuse(place, f"{name} holds {kind}; set it whole: --set {name}=...")
                return None
        assert isinstance(target, dict)  # the loop has seen to it, and read_document to the top
        return target

    def _forget(self, path: KeyPath) -> None:
        for places in (self.keys, self.values):
            for known in [known for known in places if known[: len(path)] == path]:
                del places[known]

    def _refuse(self, place: Place, text: str) -> None:
        self.problems.append(Problem((), text, place=place))


def read_document(path: Path, what: str = "recipe") -> Document:
    """Read a YAML file whose top is a mapping; ``what`` is the word for it in errors.

    Raises RecipeError where there is no such file or it is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8; save the {what} as UTF-8") from error
    except OSError as error:
        raise RecipeError(f"{path}: {(error.strerror or str(error)).lower()}; give the path of a {what}") from error
    document = Document(str(path), text)
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        document.data = _convert(root, (), document, set(), None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not valid YAML: {_first_line(error)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise RecipeError(f"{path}:{line}:{column}: not valid YAML: {error.reason}") from error
    except RecursionError as error:
        raise RecipeError(f"{path}: nested too deeply; a {what} has few levels") from error
    if not isinstance(document.data, dict):
        raise RecipeError(f"{path}:1:1: found {describe(document.data)}; a {what} is a mapping of sections")
    return document


def refusal(document: Document, problems: Sequence[Problem]) -> RecipeError | DataError:
    """The error of all ``problems``, a line each: of data where there is nothing else wrong than files not there."""
    text = "\n".join(document.render(problems))
    is_data = bool(problems) and all(problem.is_data for problem in problems)
    return DataError(text) if is_data else RecipeError(text)


def independent(written: Sequence[Problem], conflicts: Sequence[Problem]) -> list[Problem]:
    """What is ``written`` wrongly, and of the ``conflicts`` those that do not follow from another problem."""
    every = (*written, *conflicts)
    unread = [problem.path for problem in written if problem.is_unread]

    def follows(problem: Problem) -> bool:
        if any(_is_in(problem.path, path) or _is_in(path, problem.path) for path in unread):
            return True
        needs = problem.needs
        return needs is not None and any(_is_wrong(needs, other) for other in every if other is not problem)

    return [*written, *(problem for problem in conflicts if not follows(problem))]


def _is_wrong(part: KeyPath, problem: Problem) -> bool:
    """Whether ``problem`` is with ``part``, or leaves it out by a misspelling."""
    return _is_in(problem.path, part) or (problem.meant is not None and _is_in(problem.meant, part))


def _is_in(path: KeyPath, part: KeyPath) -> bool:
    return path[: len(part)] == part


def value_at(data: Any, path: Sequence[str | int]) -> Any:
    """The value at ``path`` in nested mappings and lists; None where any part is absent."""
    for part in path:
        if isinstance(data, list) and isinstance(part, int):
            data = data[part] if part < len(data) else None
        else:
            data = data.get(part) if isinstance(data, Mapping) else None
    return data


def describe(value: Any) -> str:
    """A value and its kind as an error shows them: ``'64' (text)``, ``true``, ``a list``."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{value[:60]!r} (text)"
    if isinstance(value, int):
        return f"{value} (a whole number)"
    if isinstance(value, float):
        return f"{value:g} (a number)"
    kind = "list" if isinstance(value, (list, tuple)) else "mapping"
    return f"a {kind}" if value else f"an empty {kind}"


def render_path(path: KeyPath) -> str:
    """``bench.concurrency[1]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _line(place: Place, problem: Problem) -> str:
    shown = render_path(problem.path if problem.shown is None else problem.shown)
    if place.is_override:
        shown = beyond(str(place).removeprefix("--set "), shown)
    return f"{place}: {shown}: {problem.text}" if shown else f"{place}: {problem.text}"


def beyond(told: str, path: str) -> str:
    """What the key path ``path`` adds to one that was ``told`` already: nothing, or its last parts."""
    rest = path.removeprefix(told)
    if rest != path and rest[:1] in (".", "["):
        return rest.removeprefix(".")
    return "" if told == path or told.startswith((f"{path}.", f"{path}[")) else path


def _convert(node: Any, path: KeyPath, document: Document, seen: set[int], place: Place | None) -> Any:
    """The plain value of a YAML node; every place is noted in ``document`` (``place`` instead of the node's own)."""
    if node is None:
        return None
    here = place or _place(document.name, node)
    document.values[path] = here
    if id(node) in seen:
        where = document.keys.get(path, here)  # the node's own place is where the value is written out
        refusal = "aliases are not supported; write the value out"
        document.problems.append(Problem(path, refusal, place=where, is_unread=True))
        return None
    seen.add(id(node))
    if node.tag not in _PLAIN_TAGS and node.tag != "!":
        document.problems.append(
            Problem(path, f"found the tag {node.tag}; write a plain value", place=here, is_unread=True)
        )
        return None
    if isinstance(node, yaml.MappingNode):
        return dict(_pairs(node, path, document, seen, place))
    if isinstance(node, yaml.SequenceNode):
        return [_convert(item, (*path, i), document, seen, place) for i, item in enumerate(node.value)]
    text = _joined_surrogates(node.value)
    if text is None:
        document.problems.append(
            Problem(path, "found half of a surrogate pair; write the character itself", place=here, is_unread=True)
        )
        return None
    if "\0" in text:  # no path, name or text has a use for it
        document.problems.append(Problem(path, "found a NUL character; leave it out", place=here, is_unread=True))
        return None
    return text if node.style is not None or node.tag == "!" else _scalar(text)


def _joined_surrogates(text: str) -> str | None:
    r"""Text with escaped pairs such as ``"\ud83d\ude00"`` as the character they stand for; None for a lone half."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return None


def _pairs(
    mapping: yaml.MappingNode, path: KeyPath, document: Document, seen: set[int], place: Place | None
) -> Iterator[tuple[str, Any]]:
    known: set[str] = set()
    for key_node, value_node in mapping.value:
        here = place or _place(document.name, key_node)
        key = key_node.value
        if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str):
            document.problems.append(Problem(path, "found a list or mapping as a key; keys are text", place=here))
        elif key == "<<" and key_node.style is None:
            text = "merge keys (<<) are not supported; write the keys out"
            document.problems.append(Problem(path, text, place=here, is_unread=True))
        elif key in known:
            first = document.keys[(*path, key)]
            earlier = "" if first.is_override else f", first at line {first.line}"
            text = f"key {key!r} is given twice{earlier}; keep one"
            document.problems.append(Problem(path, text, place=here))
        else:
            known.add(key)
            document.keys[(*path, key)] = here
            yield key, _convert(value_node, (*path, key), document, seen, place)


def _place(name: str, node: yaml.Node) -> Place:
    line, column = node.start_mark.line + 1, node.start_mark.column + 1
    return Place(False, line, column, f"{name}:{line}:{column}")


def _scalar(text: str) -> Any:
    """What an unquoted scalar means; a number too long to be one stays text."""
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _PREFIXED_INTEGER.fullmatch(text):
            return int(text, base=0)
        if _FLOAT.fullmatch(text):
            return float(text)
    except ValueError:
        return text
    special = _SPECIAL_FLOAT.fullmatch(text)
    return float(text.replace(".", "")) if special else text


def _first_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return " ".join(part for part in (error.context, error.problem) if part)
    return str(error).partition("\n")[0]
