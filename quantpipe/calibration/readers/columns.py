"""Whether the fields that a source names are there: said once for a file, not for each of its rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from quantpipe.calibration.definition.sources import DatasetSource, FileSource
from quantpipe.calibration.readers.field_names import there_are
from quantpipe.calibration.readers.values import ABSENT, lookup
from quantpipe.calibration.rows import Row, SourceReading
from quantpipe.errors import DataError

# A field of JSON objects that none of so many has is a wrong name, and not one that some objects lack.
PATIENCE_ROWS = 200


def check_columns(
    columns: Sequence[str],
    source: FileSource | DatasetSource,
    where: str,
    are_data: Callable[[], bool] | None = None,
) -> None:
    """Raise DataError where a table lacks a column that the source names.

    ``are_data`` is given where ``columns`` are the first row of a file, and asked whether they are no names but a row,
    which an error must not show.
    """
    for name in _used(source):
        if name not in columns and name.split(".")[0] not in columns:
            is_first_row = are_data is not None
            is_data = are_data is not None and are_data()
            found = there_are("column", name, columns, _used(source), is_first_row, is_data)
            raise DataError(f"{where}: no column {name!r}; {found}")


def with_fields(rows: Iterable[Row], source: FileSource, seen: SourceReading) -> Iterator[Row]:
    """The rows, which are objects with fields that may differ from one to the next.

    Raises DataError where a field of the sample's text is in none of the first rows, or another field in no row.
    """
    texts, others = set(source.fields.names), {*source.other_names, *source.drop_columns}
    met: dict[str, None] = {}
    num_rows = 0
    for row in rows:
        if texts or others:
            num_rows += 1
            if num_rows <= PATIENCE_ROWS:
                met.update(dict.fromkeys(row.values))
            for names in (texts, others):
                names.difference_update([name for name in names if lookup(row.values, name) is not ABSENT])
            if texts and num_rows == PATIENCE_ROWS:
                break
        yield row
    missing = sorted(texts) or (sorted(others) if not seen.is_limited else [])
    if num_rows and missing:
        found = there_are("field", missing[0], list(met), _used(source))
        raise DataError(f"{source.label}: no field {missing[0]!r}; {found}")


def _used(source: FileSource | DatasetSource) -> tuple[str, ...]:
    return (*source.fields.names, *source.other_names, *source.drop_columns)
