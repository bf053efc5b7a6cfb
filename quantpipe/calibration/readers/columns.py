"""Whether the fields that a source names are there: said once for a file, not for each of its rows."""

import difflib
from collections.abc import Iterable, Iterator, Sequence

from quantpipe.calibration.fields import ABSENT, lookup
from quantpipe.calibration.rows import Row, SourceReading, shown_names
from quantpipe.calibration.sources import DatasetSource, FileSource
from quantpipe.errors import DataError

# A field of JSON objects that none of so many has is a wrong name, and not one that some objects lack.
PATIENCE_ROWS = 200


def check_columns(columns: Sequence[str], source: FileSource | DatasetSource, where: str) -> None:
    """Raise DataError where a table lacks a column that the source names."""
    for name in (*source.fields.names, *source.other_names, *source.drop_columns):
        if name not in columns and name.split(".")[0] not in columns:
            raise _missing("column", name, columns, where)


class ObjectFields:
    """Which of the source's fields were met in objects, whose fields may differ from one to the next."""

    def __init__(self, source: FileSource | DatasetSource, where: str) -> None:
        self._where = where
        self._texts = set(source.fields.names)
        self._others = {*source.other_names, *source.drop_columns}
        self._met: dict[str, None] = {}
        self._num_rows = 0

    def checked(self, rows: Iterable[Row], seen: SourceReading) -> Iterator[Row]:
        """The rows. Raises DataError where a field of the text is in none of the first rows, or another in no row."""
        for row in rows:
            if self._texts or self._others:
                self._meet(row)
            yield row

    def check_end(self) -> None:
        """Raise DataError where a field was in no row at all."""
        if self._num_rows and (missing := sorted(self._texts) or sorted(self._others)):
            raise _missing("field", missing[0], list(self._met), self._where)

    def _meet(self, row: Row) -> None:
        self._num_rows += 1
        if self._num_rows <= PATIENCE_ROWS:
            self._met.update(dict.fromkeys(map(str, row.values)))
        for names in (self._texts, self._others):
            names.difference_update([name for name in names if lookup(row.values, name) is not ABSENT])
        if self._texts and self._num_rows == PATIENCE_ROWS:
            self.check_end()


def _missing(what: str, name: str, there_are: Sequence[str], where: str) -> DataError:
    nearest = difflib.get_close_matches(name, there_are, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "; correct the name in the set"
    return DataError(f"{where}: no {what} {name!r}; there are: {shown_names(there_are)}{hint}")
