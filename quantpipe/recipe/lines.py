"""Where in the recipe file a refusal has its cause, for what is found only once the model or the data is there.

Such a refusal begins with the key path of the value it is about: ``quantize.ignore[1]: ...``. Knows nothing of what the
values mean.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quantpipe.errors import DataError, RecipeError
from quantpipe.recipe.document import KeyPath, Problem, beyond, value_at
from quantpipe.recipe.schema import Recipe

_HEAD = re.compile(r"([a-z_]+(?:\.[a-z_][a-z0-9_]*|\[[0-9]+\])*): (?:([a-z0-9_]+(?:\[[^\]]*\])?): )?")
_PART = re.compile(r"[a-z_][a-z0-9_]*|[0-9]+")


@contextmanager
def naming_lines(recipe: Recipe) -> Iterator[None]:
    """Within it, a refusal that begins with a key path of ``recipe`` gets its ``file:line:column`` in front."""
    try:
        yield
    except (RecipeError, DataError) as error:
        raise type(error)(with_line(recipe, str(error))) from error


def with_line(recipe: Recipe, text: str) -> str:
    """``text`` with the place of the value that it begins with; as it is where there is none."""
    document, head = recipe.document, _HEAD.match(text)
    if document is None or head is None:
        return text
    path: KeyPath = tuple(int(part) if part.isdigit() else part for part in _PART.findall(head[1]))
    if path[0] not in document.data:
        return text
    path = (*path, *_entry(value_at(document.data, path), head[2]))
    place = document.place_of(Problem(path, text))
    if not place.is_override:
        return f"{place}: {text}"
    rest = beyond(str(place).removeprefix("--set "), head[1])
    return f"{place}: {rest}{text[len(head[1]) :] if rest else text[len(head[1]) + 2 :]}"


def _entry(values: Any, name: str | None) -> Sequence[int | str]:
    """The index of the entry of a list that has this name, as in ``quantize.transforms: rotate: ...``; or the name
    itself, where it is a key that no path can hold, as in ``gate: mean_kl[domain=legal]: ...``."""
    if isinstance(values, Mapping) and name is not None and "[" in name:
        return [name] if name in values else []
    found = enumerate(values if isinstance(values, list) and name is not None else ())
    return [index for index, value in found if value_at(value, ("name",)) == name][:1]
