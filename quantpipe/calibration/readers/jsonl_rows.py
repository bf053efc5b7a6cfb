"""Rows of a JSON Lines file: one object in each line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.readers.lines import Lines
from quantpipe.calibration.readers.values import kind_of
from quantpipe.calibration.rows import EMPTY, NO_OBJECT, Row, RowError, RowProblems, SourceReading, leave_out


def read_jsonl(
    opened: IO[bytes], file: Path, source: FileSource, problems: RowProblems, seen: SourceReading
) -> Iterator[Row]:
    """Yield the file's rows; lines that are none are added to ``problems``, blank ones only counted."""
    lines = Lines(opened, file, source.encoding, seen)
    for line in lines:
        flaw = lines.end_row()
        if flaw is None and not line.strip():
            seen.dropped[EMPTY] += 1
            continue
        seen.start_row(lines.number)
        where = f"{file}:{lines.number}"
        try:
            if flaw is not None:
                raise flaw
            values = _parse(line)
        except RowError as error:
            leave_out(where, error, problems, seen)
        else:
            yield Row(where, values)


def _parse(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise RowError(
            f"not valid JSON at column {error.colno}: {error.msg.lower()}; one object per row", "not JSON"
        ) from None
    except RecursionError:
        raise RowError("nested too deeply; one flat object per row", "nested too deeply") from None
    except ValueError:
        raise RowError("a number is too long; write it as text", "number too long") from None
    if not isinstance(value, dict):
        raise RowError(f"found {kind_of(value)}; each row is an object with the fields that the set names", NO_OBJECT)
    return value
