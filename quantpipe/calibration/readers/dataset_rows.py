"""Rows of a Hugging Face data set, streamed: nothing is downloaded whole, and caches are removed."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantpipe.calibration.definition.sources import DatasetSource
from quantpipe.calibration.readers.columns import check_columns
from quantpipe.calibration.rows import Row, SourceReading
from quantpipe.errors import DataError

_COMMIT = re.compile(r"@([0-9a-f]{40})(/|$)")


def read_dataset(source: DatasetSource, seen: SourceReading, work_folder: Path | None) -> Iterator[Row]:
    """Yield the split's rows. Raises DataError where it cannot be reached or lacks a column."""
    with tempfile.TemporaryDirectory(dir=work_folder) as cache:
        rows, columns = _open(source, seen, cache)
        name = f"{source.dataset}[{source.split}]"
        if columns is not None:
            check_columns(columns, source, name)
            rows = rows.select_columns(_used(columns, source))
        number = 0
        with _streaming(name, seen):
            for values in rows:
                number += 1
                if columns is None:
                    columns = list(values)
                    check_columns(columns, source, name)
                seen.start_row(number)
                yield Row(f"{name}:{number}", values)


def _open(source: DatasetSource, seen: SourceReading, cache: str) -> tuple[Any, list[str] | None]:
    """The split as something to iterate over, and its columns where they are known before the first row."""
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(source.dataset, source.config, cache_dir=cache, revision=source.revision)
        rows = builder.as_streaming_dataset(split=source.split)
    except Exception as error:  # the library raises errors of many kinds for what is missing or out of reach
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(
            f"{source.dataset}: cannot be opened: {reason}; correct dataset, config, split or revision"
        ) from None
    commit = _COMMIT.search(str(builder.base_path))
    seen.revision = commit.group(1) if commit else source.revision
    return rows, rows.column_names


def _used(columns: list[str], source: DatasetSource) -> list[str]:
    wanted = [*source.fields.names, *source.other_names]
    return [column for column in columns if any(name == column or name.split(".")[0] == column for name in wanted)]


@contextmanager
def _streaming(name: str, seen: SourceReading) -> Iterator[None]:
    """Turns failures of the library into DataError without its words, which may quote rows."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        text = f"streaming failed after row {seen.num_rows:,} ({type(error).__name__}); try again, or download the file"
        raise DataError(f"{name}: {text}") from None
