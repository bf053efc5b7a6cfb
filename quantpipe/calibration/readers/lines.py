"""The lines of a file as text: encodings tried for each, lines that are too long left out. Knows no formats."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from quantpipe.calibration.readers.files import LONGEST, MAX_ROW_BYTES, skip_mark
from quantpipe.calibration.rows import RowError, SourceReading

_CJK = range(0x4E00, 0xA000)
_CJK_SIGNS = (range(0x3000, 0x3040), range(0xFF00, 0xFFF0), range(0x2010, 0x2030))


class LongRow(Exception):  # noqa: N818 - what it means is for the caller to say
    """The lines since the last ``end_row`` are more than one row may hold."""


class Lines:
    """Lines of an open file with their ends; ``number`` is that of the last one, counted from 1.

    A line that cannot be read comes out maimed, and ``end_row`` says why. Raises LongRow where ``end_row`` is not
    called often enough: memory stays bounded.
    """

    def __init__(self, opened: IO[bytes], file: Path, encodings: tuple[str, ...], seen: SourceReading) -> None:
        skip_mark(opened, file)
        self._opened, self._encodings, self._seen = opened, encodings, seen
        self._flaw: RowError | None = None
        self._num_bytes = 0
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        readline, encoding, counts = self._opened.readline, self._encodings[0], self._seen.encodings
        while line := readline(MAX_ROW_BYTES + 1):
            self.number += 1
            if len(line) > MAX_ROW_BYTES:
                yield self._too_long(line)
                continue
            try:
                text = line.decode(encoding)
                counts[encoding] += 1
            except UnicodeDecodeError as error:
                text = self._otherwise(line, error)
            self._num_bytes += len(line)
            if self._num_bytes > MAX_ROW_BYTES:
                raise LongRow
            yield text

    def end_row(self) -> RowError | None:
        """What is wrong with the lines of the row that ends with the last line; None if nothing."""
        flaw, self._flaw, self._num_bytes = self._flaw, None, 0
        return flaw

    def _otherwise(self, line: bytes, error: UnicodeDecodeError) -> str:
        for encoding in self._encodings[1:]:
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError:
                continue
            self._seen.encodings[encoding] += 1
            return text
        self._flaw = self._flaw or RowError(undecodable(line, error, self._encodings), _not_in(self._encodings))
        return line.decode("ascii", errors="replace")

    def _too_long(self, line: bytes) -> str:
        """Reads past the line; its quotes count, for a format that pairs them."""
        num_quotes = line.count(b'"')
        while not line.endswith(b"\n") and (line := self._opened.readline(MAX_ROW_BYTES)):
            num_quotes += line.count(b'"')
        self._flaw = RowError(f"the row is longer than {LONGEST}; split it", "too long")
        return '"' * (num_quotes % 2) + "\n"


def undecodable(row: bytes, error: UnicodeDecodeError, encodings: tuple[str, ...]) -> str:
    """What is wrong with a row that none of the encodings fits, and which encoding to try; never what it says."""
    found = f"byte {error.start + 1} of the row is {_not_in(encodings)}"
    if "gb18030" not in encodings and _reads_as_chinese(row):
        return f"{found}; it reads as GB18030: set encoding: [{', '.join((*encodings, 'gb18030'))}]"
    return f"{found}; convert the file to UTF-8, or name its encoding: encoding: [{encodings[0]}, cp1252]"


def _not_in(encodings: tuple[str, ...]) -> str:
    return f"not {' or '.join(encoding.upper() for encoding in encodings)}"


def _reads_as_chinese(row: bytes) -> bool:
    """Whether all that is not ASCII in the row is Chinese, read as GB18030."""
    try:
        text = row.decode("gb18030")
    except UnicodeDecodeError:
        return False
    codes = [ord(character) for character in text if character > "\x7f"]
    return all(code in _CJK or any(code in signs for signs in _CJK_SIGNS) for code in codes)
