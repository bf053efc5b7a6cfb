"""The files of a source: patterns, digests, compression, and what is no file."""

import gzip
import hashlib
import json
import zlib
from pathlib import Path

import pytest
from calibration.reading import Reading

from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.readers import read_rows
from quantpipe.calibration.readers.files import files_of
from quantpipe.calibration.rows import Row, RowProblems, SourceReading
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


def read_until_error(folder: Path, path: str) -> tuple[list[Row], str]:
    rows: list[Row] = []
    with pytest.raises(DataError) as caught:
        for row in read_rows(FileSource(path=path), folder, RowProblems(), SourceReading()):
            rows.append(row)
    return rows, str(caught.value).removeprefix(f"{folder}/")


def unpacked(stored: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(stored)


LINES = [json.dumps({"text": f"row {i} {i * i}"}).encode() for i in range(20_000)]
# Without the time: what is stored names tests, and every worker must name them alike.
PACKED = gzip.compress(b"\n".join(LINES) + b"\n", mtime=0)
ARRAY = gzip.compress(b"[" + b",\n".join(LINES) + b"]", mtime=0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_every_whole_line_before_the_cut_is_read(tmp_path: Path, share: float) -> None:
    cut = PACKED[: int(len(PACKED) * share)]
    (tmp_path / "a.jsonl.gz").write_bytes(cut)
    num_whole = unpacked(cut).count(b"\n")
    rows, problem = read_until_error(tmp_path, "a.jsonl.gz")
    assert len(rows) == num_whole > 1000
    said = f"the compressed data ends early, after row {num_whole:,}; copy or download the file again"
    assert problem == f"a.jsonl.gz: {said}"


def test_every_entry_of_a_document_before_the_cut_is_read(tmp_path: Path) -> None:
    cut = ARRAY[: len(ARRAY) // 2]
    (tmp_path / "a.json.gz").write_bytes(cut)
    rows, problem = read_until_error(tmp_path, "a.json.gz")
    assert len(rows) == unpacked(cut).count(b"},")
    assert f"ends early, after row {len(rows):,};" in problem


def test_lines_before_damaged_bytes_are_read(tmp_path: Path) -> None:
    packing = zlib.compressobj(wbits=31)
    whole = packing.compress(b"\n".join(LINES) + b"\n") + packing.flush(zlib.Z_FULL_FLUSH)
    (tmp_path / "a.jsonl.gz").write_bytes(whole + b"\x07" + PACKED)  # there are no blocks of that type
    rows, problem = read_until_error(tmp_path, "a.jsonl.gz")
    assert len(rows) == len(LINES)
    assert problem.startswith("a.jsonl.gz: the compressed data is damaged after row 20,000; ")


def test_a_wrong_check_sum_at_the_end_costs_no_row(tmp_path: Path) -> None:
    stored = PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:]
    (tmp_path / "a.jsonl.gz").write_bytes(stored)
    rows, problem = read_until_error(tmp_path, "a.jsonl.gz")
    assert len(rows) == len(LINES)
    assert "damaged after row 20,000; " in problem


def test_the_row_is_the_line_in_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(ROWS))
    stored = gzip.compress(b'text\n"one\ntwo"\n\n"three\nfour"\nfive\n')
    (tmp_path / "b.csv.gz").write_bytes(stored[:-8])
    rows, problem = read_until_error(tmp_path, "*.csv.gz")
    assert rows[-1].where == f"{tmp_path}/b.csv.gz:7"
    assert problem == "b.csv.gz: the compressed data ends early, after row 7; copy or download the file again"


def test_members_and_padding_are_read_on(tmp_path: Path) -> None:
    stored = gzip.compress(b"text\na\n") + gzip.compress(b"b\n") + b"\0" * 70_000 + gzip.compress(b"c\n") + b"\0"
    assert Reading(tmp_path, stored, "a.csv.gz").texts == ["a", "b", "c"]
    (tmp_path / "b.csv.gz").write_bytes(stored + b"rest")
    rows, problem = read_until_error(tmp_path, "b.csv.gz")
    assert len(rows) == 3
    assert "damaged after row 4" in problem


def test_very_small_files_that_unpack_to_much_are_read_in_pieces(tmp_path: Path) -> None:
    assert len(Reading(tmp_path, gzip.compress(b"text\n" + b"a\n" * 4_000_000), "a.csv.gz", limit=9).rows) == 9


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (b"text\nsecret\n", "is not gzip; correct its name"),
        (PACKED[:12], "the compressed data ends early, before its first row ends; copy or download the file again"),
        (PACKED[:1], "the compressed data ends early, before its first row ends; copy or download the file again"),
        (
            PACKED[:10] + b"\xff" * 100,
            "the compressed data is damaged before its first row ends; copy or download the file again",
        ),
        (b"", "is empty; a csv file begins with a row of column names"),
    ],
)
def test_only_a_file_that_does_not_begin_like_gzip_is_called_none(tmp_path: Path, stored: bytes, problem: str) -> None:
    (tmp_path / "a.csv.gz").write_bytes(stored)
    assert read_until_error(tmp_path, "a.csv.gz") == ([], f"a.csv.gz: {problem}")
