"""Reads small files through ``read_rows`` for the tests of readers: bytes in, rows and problems out."""

from pathlib import Path
from typing import Any

from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.readers import read_rows
from quantpipe.calibration.rows import Row, RowProblems, SourceReading


class Reading:
    """What came of one file: ``rows`` without the folder in front, ``problems`` in words, ``seen``."""

    def __init__(self, folder: Path, stored: bytes, name: str, **keys: Any) -> None:
        (folder / name).write_bytes(stored)
        source = FileSource.model_validate({"path": name, **keys})
        found, self.seen = RowProblems(), SourceReading()
        rows = read_rows(source, folder, found, self.seen)
        self.rows = [Row(row.where.removeprefix(f"{folder}/"), row.values) for row in rows]
        self.problems = [line.removeprefix(f"{folder}/") for line in found.lines]

    @property
    def texts(self) -> list[Any]:
        return [row.values["text"] for row in self.rows]
