"""Rows of a CSV file, with a header or columns that the source names, numbered by the line where they start."""

import csv
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO

from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.readers.columns import check_columns
from quantpipe.calibration.readers.field_names import are_names
from quantpipe.calibration.readers.files import LONGEST, MAX_ROW_BYTES
from quantpipe.calibration.readers.lines import Lines, LongRow
from quantpipe.calibration.rows import EMPTY, Row, RowError, RowProblems, SourceReading, leave_out
from quantpipe.errors import DataError
from quantpipe.wording import count_of

Records = Iterator[tuple[int, list[str], RowError | None]]
MOST_COMPARED = 1000  # rows that are looked at where the first one has none of the names that the set uses
_DELIMITERS = {",": "','", ";": "';'", "\t": '"\\t"', "|": "'|'"}


def read_csv(
    opened: IO[bytes], file: Path, source: FileSource, problems: RowProblems, seen: SourceReading
) -> Iterator[Row]:
    """Yield the file's rows; those that do not fit the header are added to ``problems``, blank ones only counted.

    Raises DataError for a header that lacks a column, and for a quote that is never closed: no row after it is sure.
    """
    delimiter = source.delimiter or ("\t" if file.name.lower().removesuffix(".gz").endswith(".tsv") else ",")
    header = list(source.columns or ())
    if header:
        check_columns(header, source, str(file))
    records = _records(Lines(opened, file, source.encoding, seen), file, delimiter)
    for number, record, flaw in records:
        if not record and flaw is None:
            if header:
                seen.dropped[EMPTY] += 1
            continue
        if not header:
            if flaw is not None:
                raise DataError(f"{file}:{number}: the row of column names: {flaw}")
            header = _header(record, records, file, source, delimiter)
            continue
        seen.start_row(number)
        if flaw is None and len(record) != len(header):
            names = "the first row" if source.columns is None else "the list of columns"
            flaw = RowError(
                f"the row has {count_of(len(record), 'columns')}, {names} {len(header)}; quote columns with commas",
                "wrong number of columns",
            )
        if flaw is None:
            yield Row(f"{file}:{number}", dict(zip(header, record, strict=True)))
        else:
            leave_out(f"{file}:{number}", flaw, problems, seen)
    if not header:
        raise DataError(f"{file}: is empty; a csv file begins with a row of column names")


def _records(lines: Lines, file: Path, delimiter: str) -> Records:
    """Each record with the number of its first line, and what is wrong with it."""
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))  # the interpreter's own is 128 KiB
    records = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    while True:
        start, record, flaw = lines.number + 1, [], None
        try:
            record = next(records)
        except StopIteration:
            return
        except LongRow:
            raise DataError(
                f"{file}:{start}: a quote that opens here is not closed within {LONGEST}; close it"
            ) from None
        except csv.Error as error:
            if "unexpected end" in str(error):
                text = f"a quote that opens here is still open at the end of the file, line {lines.number:,}; close it"
                raise DataError(f"{file}:{start}: {text}") from None
            flaw = RowError(_malformed(start, lines.number), "text after a closing quote")
        yield start, record, lines.end_row() or flaw


def _malformed(start: int, end: int) -> str:
    read = "" if start == end else f", read to line {end:,}"
    return f"text follows a closing quote{read}; double quotes inside a quoted column, and close each"


def _header(record: Sequence[str], others: Records, file: Path, source: FileSource, delimiter: str) -> list[str]:
    names = [name.strip() for name in record]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        first, second = [place for place, name in enumerate(names, start=1) if name == twice[0]][:2]
        is_header = are_names(names, source.fields.names, is_first_row=True)
        called = twice[0] if is_header else "the same (the file may lack its header)"
        raise DataError(f"{file}: columns {first} and {second} are called {called}; rename one")
    other = next((sign for sign in _DELIMITERS if sign != delimiter and sign in names[0]), None)
    if len(names) == 1 and other is not None and names[0] not in source.fields.names:
        raise DataError(f"{file}: the first row is one column with {_DELIMITERS[other]} in it; set delimiter to that")
    check_columns(names, source, str(file), lambda: _comes_again(record, others))
    return names


def _comes_again(record: Sequence[str], others: Records) -> bool:
    """Whether the first row seems to be data: one of the next rows has one of its values in the same column."""
    return any(
        value and value == other
        for _, row, _ in islice(others, MOST_COMPARED)
        for value, other in zip(record, row, strict=False)
    )
