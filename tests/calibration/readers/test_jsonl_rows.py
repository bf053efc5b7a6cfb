"""Rows of JSON Lines files, and the one line each bad row gets."""

from pathlib import Path

import pytest
from calibration.reading import Reading

from quantpipe.errors import DataError

GOOD = b'{"text": "good"}\n'


def test_each_line_is_a_row_with_its_number(tmp_path: Path) -> None:
    read = Reading(tmp_path, '\ufeff{"text": "one", "id": 4}\r\n\n{"text": "二"}'.encode(), "a.jsonl")
    assert [(row.where, row.values) for row in read.rows] == [
        ("a.jsonl:1", {"text": "one", "id": 4}),
        ("a.jsonl:3", {"text": "二"}),
    ]
    assert read.seen.dropped == {"empty": 1}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            b'{"text": "caf\xe9"}',
            "byte 14 of the row is not UTF-8; convert the file to UTF-8, or name its encoding: "
            "encoding: [utf-8, cp1252]",
        ),
        (
            '{"text": "中文，好。"}'.encode("gb18030"),
            "byte 11 of the row is not UTF-8; it reads as GB18030: set encoding: [utf-8, gb18030]",
        ),
        (b'{"text": "a"', "not valid JSON at column 13: expecting ',' delimiter; one object per row"),
        (b'["a"]', "found a list; each row is an object with the fields that the set names"),
        (b"null", "found empty (null); each row is an object with the fields that the set names"),
        (b"[" * 100_000, "nested too deeply; one flat object per row"),
        (b'{"text": ' + b"9" * 5000 + b"}", "a number is too long; write it as text"),
        (b"\0\0", "not valid JSON at column 1: expecting value; one object per row"),
    ],
)
def test_unusable_row_is_one_line_with_file_and_row(tmp_path: Path, row: bytes, problem: str) -> None:
    read = Reading(tmp_path, GOOD + row + b"\n" + GOOD, "a.jsonl")
    assert read.texts == ["good", "good"]
    assert read.problems == [f"a.jsonl:2: {problem}"]
    assert read.seen.num_rows == 3


def test_problems_never_show_what_a_row_says(tmp_path: Path) -> None:
    rows = [b'{"text": "secret-a"', b'"secret-b"', b'{"text": secret-c}', b'{"text": "secret-d\xff"}']
    read = Reading(tmp_path, b"\n".join(rows), "a.jsonl")
    assert len(read.problems) == 4
    assert "secret" not in "".join(read.problems)


def test_encodings_are_tried_row_by_row_and_counted(tmp_path: Path) -> None:
    rows = [text.encode(encoding) for text, encoding in (("中文", "utf-8"), ("客服", "gb18030"), ("a", "utf-8"))]
    stored = b"\n".join(b'{"text": "' + row + b'"}' for row in rows)
    read = Reading(tmp_path, stored, "a.jsonl", encoding=["utf-8", "gb18030"])
    assert read.texts == ["中文", "客服", "a"]
    assert read.seen.encodings == {"utf-8": 2, "gb18030": 1}


def test_a_field_that_no_row_has_is_said_once_with_the_fields_there_are(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, b'{"txt": "secret", "id": 1}\n{"other": 2}\n', "a.jsonl")
    assert str(caught.value) == "a.jsonl: no field 'text'; there are: txt, id, other; did you mean 'txt'?"
