"""Paths that say something on the machine of whoever reads a report, and nothing of the one that made it."""

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from quantpipe.reporting.report import Report

# A path from the root with two parts at least; one part, such as /health, is more likely something else. What follows
# a letter, a dot, a slash or a colon is the rest of a relative path or of a URL.
_ABSOLUTE = re.compile(r"(?<![\w.:/~$}>-])/(?:[^\s/'\"=,;:()<>|`\[\]{}]+/)+[^\s/'\"=,;:()<>|`\[\]{}]*")
Value = TypeVar("Value")


def roots_of(output: Path, cache: Path | None = None) -> dict[Path, str]:
    """What the folders of a run are called in its report."""
    roots = {Path.cwd(): ".", output.resolve(): "OUTPUT"}
    if cache is not None:
        roots[cache.resolve()] = "$QUANTPIPE_CACHE"
    return roots | {Path.home(): "~"}


def without_paths(report: Report, roots: Mapping[Path, str]) -> Report:
    """The report with every absolute path in it shortened."""
    return _each_text(report, roots)


def shorten(text: str, roots: Mapping[Path, str]) -> str:
    """Paths below one of the ``roots`` begin with its name; of others the last part is left: ``.../model.gguf``.

    What no file in UTF-8 can hold is replaced too: names of files and of items may have such characters.
    """
    shown = text.encode("utf-8", "replace").decode("utf-8")
    for root, name in roots.items():
        if root != Path(root.anchor):  # as it is written, for it may hold spaces
            place = rf"(?<![\w.:/~$}}>-]){re.escape(str(root))}(?![^\s/'\",;:)\]}}])"
            shown = re.sub(place, name.replace("\\", r"\\"), shown)
    return _ABSOLUTE.sub(lambda match: f".../{Path(match[0]).name}", shown)


def _each_text(value: Value, roots: Mapping[Path, str]) -> Value:
    """The same structure with every text in it shortened; names of dataclasses' fields and keys stay."""
    changed: object = value
    if isinstance(value, str) and not isinstance(value, Enum):
        changed = shorten(value, roots)
    elif isinstance(value, tuple):
        changed = tuple(_each_text(each, roots) for each in value)
    elif isinstance(value, Mapping):
        changed = {key: _each_text(each, roots) for key, each in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        changed = replace(value, **{each.name: _each_text(getattr(value, each.name), roots) for each in fields(value)})
    return changed  # type: ignore[return-value]
