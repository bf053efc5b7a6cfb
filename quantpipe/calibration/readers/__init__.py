"""Rows of a source, one at a time: what each format needs is in a file of its own. Knows no mapping and no tokens.

Files are read with the standard library where a row's bytes can be broken: only then can an error name the row.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from quantpipe.calibration.definition.sources import DatasetSource, FileSource
from quantpipe.calibration.readers.columns import with_fields
from quantpipe.calibration.readers.csv_rows import read_csv
from quantpipe.calibration.readers.dataset_rows import read_dataset
from quantpipe.calibration.readers.files import files_of, open_hashed
from quantpipe.calibration.readers.json_document import read_json
from quantpipe.calibration.readers.jsonl_rows import read_jsonl
from quantpipe.calibration.readers.parquet_rows import read_parquet
from quantpipe.calibration.readers.text_rows import read_text
from quantpipe.calibration.rows import LimitReached, Row, RowProblems, SourceReading

__all__ = ["files_of", "read_rows"]

# Formats whose rows may differ in their fields; the others have columns.
OBJECT_FORMATS = ("jsonl", "json")
LINE_READERS = {"csv": read_csv, "jsonl": read_jsonl, "json": read_json, "text": read_text}


def read_rows(
    source: FileSource | DatasetSource,
    folder: Path,
    problems: RowProblems,
    seen: SourceReading,
    work_folder: Path | None = None,
) -> Iterator[Row]:
    """Yield the source's rows without its ``drop_columns``, at most ``limit`` of them; fill ``seen``.

    ``folder`` is what the source's path is relative to; libraries keep their caches below ``work_folder`` (None: the
    system's folder for such) and remove them. A file's digest is that of the whole file, however few rows are read.
    Raises DataError where a file cannot be read, is damaged, or lacks a field.
    """
    seen.limit = source.limit
    rows = _rows(source, folder, problems, seen, work_folder)
    if isinstance(source, FileSource) and source.format_of(source.path) in OBJECT_FORMATS:
        rows = with_fields(rows, source, seen)
    if not source.drop_columns:
        yield from rows
        return
    dropped = frozenset(source.drop_columns)
    for where, values in rows:
        yield Row(where, {name: value for name, value in values.items() if name not in dropped})


def _rows(
    source: FileSource | DatasetSource,
    folder: Path,
    problems: RowProblems,
    seen: SourceReading,
    work_folder: Path | None,
) -> Iterator[Row]:
    if isinstance(source, DatasetSource):
        try:
            yield from read_dataset(source, seen, work_folder)
        except LimitReached:
            seen.is_limited = True
        return
    for file in files_of(source, folder):
        with open_hashed(file, seen) as opened:
            try:
                yield from _rows_of_file(opened, file, source, problems, seen, work_folder)
            except LimitReached:
                seen.is_limited = True


def _rows_of_file(
    opened: IO[bytes],
    file: Path,
    source: FileSource,
    problems: RowProblems,
    seen: SourceReading,
    work_folder: Path | None,
) -> Iterator[Row]:
    form = source.format_of(file)
    if form == "parquet":
        return read_parquet(opened, file, source, seen, work_folder)
    assert form is not None  # the definition has seen to it
    return LINE_READERS[form](opened, file, source, problems, seen)
