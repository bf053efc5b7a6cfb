"""Rows of Parquet files."""

import gzip
import io
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from calibration.reading import Reading

from quantpipe.errors import DataError

ROWS = [{"text": f"row {i}", "n": i, "tags": ["a"], "meta": {"lang": "en"}} for i in range(1000)]


def stored(rows: list[dict[str, Any]]) -> bytes:
    written = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written)
    return written.getvalue()


@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz"])
def test_rows_come_in_order_with_the_columns_that_are_named(tmp_path: Path, name: str) -> None:
    content = stored(ROWS)
    keys = {"fields": {"text": ["text", "tags"]}, "language": {"field": "meta.lang"}}
    read = Reading(tmp_path, gzip.compress(content) if name.endswith(".gz") else content, name, **keys)
    assert len(read.rows) == 1000
    assert read.rows[999].where == f"{name}:1000"
    assert read.rows[999].values == {"text": "row 999", "tags": ["a"], "meta": {"lang": "en"}}
    assert read.seen.num_rows == 1000


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a.parquet: no column 'txt'; there are: text, n, tags, meta; did you mean"):
        Reading(tmp_path, stored(ROWS), "a.parquet", fields={"text": "txt"})


@pytest.mark.parametrize("content", [b"", b"text,n\nsecret,1\n", stored(ROWS)[:-40]])
def test_what_is_no_parquet_file_is_refused_without_its_content(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, content, "a.parquet")
    assert str(caught.value).startswith(f"{tmp_path}/a.parquet: not a Parquet file, or damaged (")
    assert "secret" not in str(caught.value)
