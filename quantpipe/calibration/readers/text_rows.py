"""Rows of a plain text file: its lines, its paragraphs, or the whole of it; a row's field is ``text``."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from quantpipe.calibration.definition.sources import TEXT_FIELD, FileSource
from quantpipe.calibration.readers.files import LONGEST
from quantpipe.calibration.readers.lines import Lines, LongRow
from quantpipe.calibration.rows import Row, RowProblems, SourceReading, leave_out
from quantpipe.errors import DataError


def read_text(
    opened: IO[bytes], file: Path, source: FileSource, problems: RowProblems, seen: SourceReading
) -> Iterator[Row]:
    """Yield the file's rows, each with the number of its first line; rows of white space alone are none."""
    lines = Lines(opened, file, source.encoding, seen)
    unit = source.text_rows or "paragraph"
    start, pieces = 1, list[str]()
    try:
        for line in lines:
            is_blank = not line.strip()
            if unit == "file" or not (is_blank or unit == "line"):
                pieces.append(line)
                continue
            if unit == "line" and not is_blank:
                pieces, start = [line], lines.number
            yield from _row(pieces, file, start, lines, problems, seen)
            start, pieces = lines.number + 1, []
    except LongRow:
        raise DataError(f"{file}:{start}: a {unit} longer than {LONGEST}; set text_rows to something shorter") from None
    yield from _row(pieces, file, start, lines, problems, seen)


def _row(
    pieces: list[str], file: Path, start: int, lines: Lines, problems: RowProblems, seen: SourceReading
) -> Iterator[Row]:
    text, flaw, where = "".join(pieces).rstrip(), lines.end_row(), f"{file}:{start}"
    if not text.strip() and flaw is None:
        return
    seen.start_row(start)
    if flaw is None:
        yield Row(where, {TEXT_FIELD: text})
    else:
        leave_out(where, flaw, problems, seen)
