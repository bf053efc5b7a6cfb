"""Rows of a JSON document, an array of objects or a mapping of ids to objects, without loading it whole.

Each entry is decoded from a window of text that moves over the file, so that memory follows the longest entry and
damage is told with the entry it lies in. (Event parsers build the path to every value: deep nesting exhausts memory.)
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quantpipe.calibration.definition.sources import KEY_FIELD, FileSource
from quantpipe.calibration.readers.files import LONGEST, MAX_ROW_BYTES, read_some, skip_mark
from quantpipe.calibration.readers.values import kind_of
from quantpipe.calibration.rows import NO_OBJECT, Row, RowError, RowProblems, SourceReading, leave_out
from quantpipe.errors import DataError

_CHUNK_BYTES = 1 << 16
_AFTER_VALUE = tuple(" \t\n\r,:]}")
_SPACE = re.compile(r"[ \t\n\r]*")
_FORMS = "a json file is one array of objects, or one mapping of ids to objects"
_OTHER_FORMS = (
    '; as in [{"text": ...}, ...] or {"id": {"text": ...}, ...}; for one object in each line set format: jsonl'
)


def read_json(
    opened: IO[bytes], file: Path, source: FileSource, problems: RowProblems, seen: SourceReading
) -> Iterator[Row]:
    """Yield the objects in order; entries that are none are added to ``problems``.

    Raises DataError for a document of another form, or damaged: what follows the damage cannot be told apart.
    """
    skip_mark(opened, file)
    for number, (key, value) in enumerate(_entries(_Window(opened, file, source.encoding[0])), start=1):
        if isinstance(value, dict):
            seen.start_row(number)
            yield Row(f"{file}:{number}", value if key is None else {KEY_FIELD: key, **value})
            continue
        if number == 1:
            raise DataError(f"{file}: its first entry is {kind_of(value)}; {_FORMS}{_OTHER_FORMS}")
        seen.start_row(number)
        leave_out(f"{file}:{number}", RowError(f"found {kind_of(value)}; {_FORMS}", NO_OBJECT), problems, seen)


class _Window:
    """The part of the file's text that is not used yet, and where to look in it."""

    def __init__(self, opened: IO[bytes], file: Path, encoding: str) -> None:
        self._opened, self._file, self._encoding = opened, file, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)()
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._is_whole = "", 0, False
        self.num_entries = 0

    def next_sign(self) -> str:
        """The next character that is no white space, not taken; nothing at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None  # the pattern matches the empty text too
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_whole:
                return ""
            self._read_on()

    def take(self, allowed: str) -> str:
        """The next sign, which must be one of ``allowed``."""
        sign = self.next_sign()
        if not sign or sign not in allowed:
            raise self.damage("is not valid JSON" if sign else "is cut short: the file ends")
        self._at += 1
        return sign

    def value(self) -> Any:
        """The value that begins at the next sign."""
        self.next_sign()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except RecursionError:
                raise self.damage("is nested too deeply") from None
            except ValueError:
                if self._is_whole:
                    raise self.damage("is not valid JSON, or the file is cut short") from None
            else:
                if self._is_whole or self._text[end : end + 1] in _AFTER_VALUE:  # a number may go on behind the window
                    self._at = end
                    return value
            if len(self._text) - self._at > MAX_ROW_BYTES:
                raise self.damage(f"is not valid JSON, or longer than {LONGEST}")
            self._read_on()

    def damage(self, what: str) -> DataError:
        """The error of the entry that is being read."""
        return DataError(f"{self._file}: entry {self.num_entries + 1:,} {what}; correct or split it")

    def _read_on(self) -> None:
        """Take in as much text again as is pending: each character is scanned a few times at most."""
        self._text, self._at = self._text[self._at :], 0
        wanted = min(len(self._text), MAX_ROW_BYTES - len(self._text))
        chunk = read_some(self._opened, max(_CHUNK_BYTES, wanted))
        self._is_whole = not chunk
        try:
            self._text += self._decoder.decode(chunk, final=self._is_whole)
        except UnicodeDecodeError:
            name = self._encoding.upper()
            where = f"{self._file}: at or after entry {self.num_entries + 1:,}"
            raise DataError(f"{where}: a byte is not {name}; convert the file to UTF-8, or set encoding") from None


def _entries(window: _Window) -> Iterator[tuple[str | None, Any]]:
    """Key (None in an array) and value of each entry."""
    opening = window.next_sign()
    if opening not in ("{", "["):
        raise window.damage(f"is missing: {_FORMS}" if opening else f"is missing, the file is empty: {_FORMS}")
    closing = "}" if opening == "{" else "]"
    window.take(opening)
    if window.next_sign() == closing:
        return
    while True:
        key = None
        if opening == "{":
            key = window.value()
            if not isinstance(key, str):
                raise window.damage("has a key that is no text")
            window.take(":")
        value = window.value()
        sign = window.take(f",{closing}")
        window.num_entries += 1
        yield key, value
        if sign == closing:
            break
    if window.next_sign():
        raise window.damage("follows the end of the document; one document per file, or use jsonl")
