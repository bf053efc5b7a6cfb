"""What a GPU check has found so far, in a JSON file that is whole after every part."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from quantpipe.errors import DataError

# ``stopped``: its time was spent before its last row. ``absent``: it needs what is not here, and was not run.
State = Literal["passed", "failed", "stopped", "absent"]
Row = dict[str, str | int | float | bool | None]


@dataclass
class PartResult:
    """The rows of one part, and how it ended. A row whose ``ok`` is false makes it ``failed``."""

    state: State
    seconds: float = 0.0
    reason: str = ""
    rows: list[Row] = field(default_factory=list)


class Record:
    """Results by part, kept in ``path``. What another machine or another version found is not taken over.

    ``notes`` say, a line each, which parts of the file are damaged: they are as if they had never run.
    """

    def __init__(self, path: Path, identity: Mapping[str, str], is_fresh: bool = False) -> None:
        self.path, self.identity = path, dict(identity)
        self.notes: list[str] = []
        self.parts: dict[str, PartResult] = {} if is_fresh else self._read()

    def is_done(self, part: str) -> bool:
        """Whether a part need not run again: it passed, or lacked what will still be lacking."""
        return part in self.parts and self.parts[part].state == "passed"

    def put(self, part: str, result: PartResult) -> None:
        """Add a part and write the file, whole or not at all. DataError where it cannot be written."""
        self.parts[part] = result
        data = {"identity": self.identity, "parts": {name: asdict(part) for name, part in self.parts.items()}}
        waiting = self.path.with_name(self.path.name + ".part")
        try:
            waiting.write_text(json.dumps(data, indent=1, allow_nan=True) + "\n", encoding="utf-8")
            waiting.replace(self.path)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}; give another --output") from None

    def _read(self) -> dict[str, PartResult]:
        if not self.path.exists():
            return {}
        try:
            data: Any = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raise self._no_record() from None
        if not isinstance(data, dict) or not isinstance(data.get("identity"), dict):
            raise self._no_record()
        if data["identity"] != self.identity:
            self.notes.append(f"{self.path}: holds what another machine or version found; it is replaced")
            return {}
        if not isinstance(data.get("parts"), dict):
            raise self._no_record()
        results = {}
        for name, part in data["parts"].items():
            fault = fault_of(part)
            if fault is None:
                results[name] = PartResult(**part)
            else:
                self.notes.append(f"{self.path}: part '{name}': {fault}; it counts as not run, and runs again")
        return results

    def _no_record(self) -> DataError:
        return DataError(f"{self.path}: no record of a GPU check; remove it or give another --output")


def fault_of(part: object) -> str | None:
    """Why a part as it was read is no ``PartResult`` that was ever written; None where it is one."""
    names = {each.name for each in fields(PartResult)}
    if not isinstance(part, dict):
        return f"found {_kind(part)}, and a mapping is expected"
    if part.keys() != names:
        odd = sorted(part.keys() - names)
        return f"unknown key '{odd[0]}'" if odd else f"{min(names - part.keys())} is missing"
    if part["state"] not in get_args(State):
        return f"state: found {part['state']!r}, and {', '.join(get_args(State))} are known"
    seconds = part["seconds"]
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
        return f"seconds: {seconds!r} is no time"
    if not isinstance(part["reason"], str):
        return f"reason: found {_kind(part['reason'])}, and text is expected"
    if not isinstance(part["rows"], list):
        return f"rows: found {_kind(part['rows'])}, and a list is expected"
    return _fault_of_rows(part["state"], part["rows"])


def _fault_of_rows(state: str, rows: list[object]) -> str | None:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            return f"rows[{number}]: found {_kind(row)}, and a mapping is expected"
        nested = [name for name, value in row.items() if isinstance(value, dict | list)]
        if nested:
            return f"rows[{number}].{nested[0]}: found {_kind(row[nested[0]])}, and a single value is expected"
        if not isinstance(row.get("ok"), bool | None):
            return f"rows[{number}].ok: found {_kind(row['ok'])}, and true, false or null is expected"
    if state == "passed" and not rows:
        return "passed, yet it holds no rows"
    if state == "passed" and any(isinstance(row, dict) and row.get("ok") is False for row in rows):
        return "passed, yet some of its rows are wrong"
    return None


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
