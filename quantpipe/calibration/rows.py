"""Rows as readers yield them, samples as mappings make them, and what is counted on the way. Knows no tokens.

Messages about rows name files, rows and fields, never what a row says: it may be a customer's text.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quantpipe.errors import DataError

MOST_SHOWN = 10
UNKNOWN_LANGUAGE = "und"
# Why rows are not used, as accounts call it.
EMPTY, BAD_ROW, FILTERED = "empty", "bad row", "filtered"
EMPTY_FIELD, NO_FIELD, NO_TEXT, NO_OBJECT = "field is empty", "no field", "field is not text", "not an object"
BY_TEMPLATE, NOTHING_WRITTEN, NO_WORDS = "refused by the template", "template wrote nothing", "only special tokens"
Message = dict[str, str]


class Row(NamedTuple):
    """The fields of one row; ``where`` (``file:row``) is how an error names it."""

    where: str
    values: Mapping[str, Any]


class Sample(NamedTuple):
    """Plain text or a conversation, and what is known about it.

    ``source`` is the index of its source in the set; ``group`` the customer or thread it belongs to; ``language`` is
    ``und`` where unknown.
    """

    where: str
    content: str | tuple[Message, ...]
    source: int = 0
    group: str | None = None
    language: str = UNKNOWN_LANGUAGE
    domain: str = ""


def sample_text(sample: Sample) -> str:
    """All text of a sample, messages joined by line breaks."""
    if isinstance(sample.content, str):
        return sample.content
    return "\n".join(message["content"] for message in sample.content)


@dataclass(frozen=True)
class FileRead:
    """One file as it was read: SHA-256 and size of its bytes as stored."""

    name: str
    sha256: str
    num_bytes: int


@dataclass
class SourceReading:
    """What reading one source came to: files, rows, lines by encoding, and why rows were left out.

    ``limit`` is the most rows to read; ``is_limited`` says that there are more; ``last_row`` is the number of the last
    one of the file that is being read; ``bad`` counts the rows among ``dropped`` that cannot be used; ``revision`` is
    the commit of a data set that was streamed.
    """

    limit: int | None = None
    files: list[FileRead] = field(default_factory=list)
    num_rows: int = 0
    encodings: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    revision: str | None = None
    is_limited: bool = False
    last_row: int = 0

    def start_row(self, number: int) -> None:
        """Count one more row, of this number in its file. Raises LimitReached instead where ``limit`` were read."""
        if self.num_rows == self.limit:
            raise LimitReached
        self.num_rows += 1
        self.last_row = number


class LimitReached(Exception):  # noqa: N818 - the end of a loop, no error
    """A source's ``limit`` of rows was read."""


@dataclass
class RowProblems:
    """Rows that cannot be used: the first few in words, the rest counted, so that a large bad file stays cheap.

    ``is_dropping`` (``bad_rows: drop``): they are only counted.
    """

    is_dropping: bool = False
    lines: list[str] = field(default_factory=list)
    num_rows: int = 0

    def add(self, where: str, text: str) -> None:
        self.num_rows += 1
        if len(self.lines) < MOST_SHOWN:
            self.lines.append(f"{where}: {text}")

    def raise_if_any(self) -> None:
        """Raise DataError with one line per row, unless such rows are dropped."""
        if not self.lines or self.is_dropping:
            return
        hidden = self.num_rows - len(self.lines)
        rest = [f"... and {hidden:,} more rows like these"] if hidden else []
        raise DataError("\n".join([*self.lines, *rest]))


class RowError(Exception):
    """Why one row is no sample; ``reason`` is what the account counts it as."""

    def __init__(self, text: str, reason: str = BAD_ROW) -> None:
        super().__init__(text)
        self.reason = reason


def leave_out(where: str, error: RowError, problems: RowProblems, seen: SourceReading) -> None:
    """Note and count a row that cannot be used."""
    problems.add(where, str(error))
    seen.dropped[error.reason] += 1
    seen.bad[error.reason] += 1
