"""Rows of a Parquet file, a batch at a time."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.readers.columns import check_columns
from quantpipe.calibration.rows import Row, SourceReading
from quantpipe.errors import DataError

_BATCH_ROWS = 256


def read_parquet(
    opened: IO[bytes], file: Path, source: FileSource, seen: SourceReading, work_folder: Path | None
) -> Iterator[Row]:
    """Yield the file's rows with the columns that the source names; others are not read.

    A compressed file is unpacked into ``work_folder`` without a name, gone when it is closed.
    """
    if not file.name.lower().endswith(".gz"):
        yield from _rows(file, file, source, seen)
        return
    with tempfile.TemporaryFile(dir=work_folder) as unpacked:
        shutil.copyfileobj(opened, unpacked)
        unpacked.seek(0)
        yield from _rows(unpacked, file, source, seen)


def _rows(stored: Any, file: Path, source: FileSource, seen: SourceReading) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(stored, pre_buffer=False) as table:
            columns = table.schema_arrow.names
            check_columns(columns, source, str(file))
            wanted = [*source.fields.names, *source.other_names]
            used = [column for column in columns if any(_is_of(name, column) for name in wanted)]
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=used):
                for values in batch.to_pylist():
                    number += 1
                    seen.start_row(number)
                    yield Row(f"{file}:{number}", values)
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        after = f" after row {number:,}" if number else ""
        text = f"not a Parquet file, or damaged{after} ({type(error).__name__}); write it again"
        raise DataError(f"{file}: {text}") from None


def _is_of(name: str, column: str) -> bool:
    return name == column or name.split(".")[0] == column
