"""The files of a source: patterns, digests, compression, and what is no file."""

import gzip
import hashlib
from pathlib import Path

import pytest
from calibration.reading import Reading

from quantpipe.calibration.readers import read_rows
from quantpipe.calibration.readers.files import files_of
from quantpipe.calibration.rows import RowProblems, SourceReading
from quantpipe.calibration.sources import FileSource
from quantpipe.errors import DataError

ROWS = b"text\n" + b"".join(b"row %d\n" % i for i in range(5000))


def names_of(folder: Path, path: str) -> list[str]:
    return [file.name for file in files_of(FileSource(path=path, format="csv"), folder)]


def test_a_pattern_names_files_in_name_order(tmp_path: Path) -> None:
    for name in ("b-2.csv", "b-10.csv", "a.csv", "b-1.txt"):
        (tmp_path / name).touch()
    (tmp_path / "b-3.csv").mkdir()
    assert names_of(tmp_path, "b-*.csv") == ["b-10.csv", "b-2.csv"]
    assert names_of(tmp_path, f"{tmp_path}/[ab]*.csv") == ["a.csv", "b-10.csv", "b-2.csv"]


def test_a_name_with_brackets_that_exists_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "rows[1].csv").touch()
    assert names_of(tmp_path, "rows[1].csv") == ["rows[1].csv"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("x.csv", "x.csv: no such file; correct the path of source 'x.csv'"),
        ("x*.csv", "x*.csv: no file matches; correct the path of source 'x*.csv'"),
        ("folder", "folder: is a folder; give a file, or a pattern such as folder/*"),
        ("/dev/null", "/dev/null: is not a file; give a file"),
    ],
)
def test_a_path_that_names_no_file_is_refused(tmp_path: Path, path: str, problem: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError) as caught:
        names_of(tmp_path, path)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == problem


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_the_digest_is_that_of_the_stored_bytes_however_few_rows_are_read(tmp_path: Path, name: str) -> None:
    stored = gzip.compress(ROWS) if name.endswith(".gz") else ROWS
    for limit in (None, 1, 4999, 5000, 5001):
        seen = Reading(tmp_path, stored, name, limit=limit).seen
        [file] = seen.files
        assert (file.name, file.sha256) == (str(tmp_path / name), hashlib.sha256(stored).hexdigest())
        assert file.num_bytes == len(stored)
        assert seen.num_rows == min(limit or 5000, 5000)
        assert seen.is_limited == (limit is not None and limit < 5000)


def test_a_limit_counts_over_all_files_and_all_are_hashed(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv", "c.csv"):
        (tmp_path / name).write_bytes(ROWS)
    seen = SourceReading()
    source = FileSource(path="*.csv", limit=7000)
    rows = list(read_rows(source, tmp_path, RowProblems(), seen))
    assert (len(rows), rows[-1].where) == (7000, f"{tmp_path}/b.csv:2001")
    assert [Path(file.name).name for file in seen.files] == ["a.csv", "b.csv", "c.csv"]
    assert len({file.sha256 for file in seen.files}) == 1


def test_compressed_data_that_is_cut_short_is_refused_with_the_last_row(tmp_path: Path) -> None:
    stored = gzip.compress(b"text\n" + b"".join(b"row %d %d\n" % (i, i * i) for i in range(200_000)))
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, stored[: len(stored) // 2], "a.csv.gz")
    before, _, after = str(caught.value).partition("after row ")
    assert before == f"{tmp_path}/a.csv.gz: the compressed data ends early, "
    assert int(after.partition(";")[0].replace(",", "")) > 10_000


@pytest.mark.parametrize("stored", [b"text\nsecret\n", gzip.compress(ROWS)[:40] + b"\xff" * 100])
def test_what_is_not_gzip_is_refused(tmp_path: Path, stored: bytes) -> None:
    with pytest.raises(DataError, match=r"a.csv.gz: not gzip, or damaged after row 0; correct its name or copy it"):
        Reading(tmp_path, stored, "a.csv.gz")
