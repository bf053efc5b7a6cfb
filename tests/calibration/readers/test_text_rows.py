"""Rows of plain text: lines, paragraphs, whole files."""

from pathlib import Path

import pytest
from calibration.reading import Reading

from quantpipe.calibration.readers.files import MAX_ROW_BYTES
from quantpipe.errors import DataError

STORED = b"\xef\xbb\xbf\n one\r\ntwo\n \t\n\nthree  \n"


@pytest.mark.parametrize(
    ("text_rows", "rows"),
    [
        ("line", [("a.txt:2", " one"), ("a.txt:3", "two"), ("a.txt:6", "three")]),
        ("paragraph", [("a.txt:2", " one\r\ntwo"), ("a.txt:6", "three")]),
        ("file", [("a.txt:1", "\n one\r\ntwo\n \t\n\nthree")]),
    ],
)
def test_a_row_is_what_the_source_says(tmp_path: Path, text_rows: str, rows: list[tuple[str, str]]) -> None:
    read = Reading(tmp_path, STORED, "a.txt", text_rows=text_rows)
    assert [(row.where, row.values["text"]) for row in read.rows] == rows
    assert read.problems == []


def test_paragraphs_are_rows_where_nothing_is_said(tmp_path: Path) -> None:
    assert Reading(tmp_path, b"# Title\n\nText\nmore\n", "a.md").texts == ["# Title", "Text\nmore"]


def test_a_paragraph_with_a_broken_byte_is_left_out_alone(tmp_path: Path) -> None:
    read = Reading(tmp_path, b"one\n\nt\xffwo\nmore\n\nthree\n", "a.txt")
    assert read.texts == ["one", "three"]
    assert read.problems == [
        "a.txt:3: byte 2 of the row is not UTF-8; convert the file to UTF-8, or name its encoding: "
        "encoding: [utf-8, cp1252]"
    ]


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert Reading(tmp_path, b" \n", "a.txt").rows == []


def test_what_is_longer_than_a_row_may_be_is_refused(tmp_path: Path) -> None:
    lines = (b"x" * 1023 + b"\n") * (MAX_ROW_BYTES // 1024 + 1)
    with pytest.raises(DataError, match=r"a.txt:3: a paragraph longer than 16 MiB; set text_rows to something shorter"):
        Reading(tmp_path, b"a\n\n" + lines, "a.txt")
