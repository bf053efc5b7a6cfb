"""What a GPU check has found so far, in a JSON file that is whole after every part."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
    """Results by part, kept in ``path``. What another machine or another version found is not taken over."""

    def __init__(self, path: Path, identity: Mapping[str, str], is_fresh: bool = False) -> None:
        self.path, self.identity = path, dict(identity)
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
            data: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            if dict(data["identity"]) != self.identity:
                return {}
            return {name: PartResult(**part) for name, part in data["parts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{self.path}: no record of a GPU check; remove it or give another --output") from None
