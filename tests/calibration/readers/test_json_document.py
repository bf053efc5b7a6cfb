"""Rows of JSON documents, read through a window: arrays, mappings, damage, and memory."""

import json
import tracemalloc
from pathlib import Path

import pytest
from calibration.reading import Reading
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.calibration.readers import json_document
from quantpipe.calibration.readers.files import MAX_ROW_BYTES
from quantpipe.calibration.readers.json_document import _entries, _Window
from quantpipe.errors import DataError


def test_an_array_and_a_mapping_of_objects_are_rows(tmp_path: Path) -> None:
    rows = Reading(tmp_path, b' [ {"text": "a"} ,\n {"text": "b"} ] \n', "a.json").rows
    assert [(row.where, row.values) for row in rows] == [("a.json:1", {"text": "a"}), ("a.json:2", {"text": "b"})]
    rows = Reading(tmp_path, b'\xef\xbb\xbf{"7": {"text": "a"}, "8": {"text": "b"}}', "a.json").rows
    assert [(row.where, row.values) for row in rows] == [
        ("a.json:1", {"_key": "7", "text": "a"}),
        ("a.json:2", {"_key": "8", "text": "b"}),
    ]


SHAPES = (
    "a json file is one array of objects, or one mapping of ids to objects; "
    'as in [{"text": ...}, ...] or {"id": {"text": ...}, ...}; for one object in each line set format: jsonl'
)


@pytest.mark.parametrize("stored", [b"[]", b" { } "])
def test_an_empty_document_has_no_rows(tmp_path: Path, stored: bytes) -> None:
    assert Reading(tmp_path, stored, "a.json").rows == []


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (
            b"",
            "entry 1 is missing, the file is empty: a json file is one array of objects, or one mapping of ids to "
            "objects; correct or split it",
        ),
        (
            b'"secret"',
            "entry 1 is missing: a json file is one array of objects, or one mapping of ids to objects; "
            "correct or split it",
        ),
        (
            b'{"data": ["secret"]}',
            "its first entry is a list; " + SHAPES,
        ),
        (
            b'["secret"]',
            "its first entry is text; " + SHAPES,
        ),
        (
            b'[{"text": "secret"}, {"text": "sec',
            "entry 2 is not valid JSON, or the file is cut short; correct or split it",
        ),
        (b'[{"text": "secret"}', "entry 1 is cut short: the file ends; correct or split it"),
        (b'[{"text": "secret"} {}]', "entry 1 is not valid JSON; correct or split it"),
        (b'[{"text": secret}]', "entry 1 is not valid JSON, or the file is cut short; correct or split it"),
        (b'{"a": {"text": "secret"}, 7: {}}', "entry 2 has a key that is no text; correct or split it"),
        (
            b'{"text": "secret"}\n{"text": "b"}',
            "its first entry is text; " + SHAPES,
        ),
        (
            b'[{"text": "a"}] {"text": "secret"}',
            "entry 2 follows the end of the document; one document per file, or use jsonl; correct or split it",
        ),
        (b'[{"text": "a"}, ' + b"[" * 100_000, "entry 2 is nested too deeply; correct or split it"),
        (
            b'[{"text": "a"}, {"text": "secret\xff"}]',
            "at or after entry 1: a byte is not UTF-8; convert the file to UTF-8, or set encoding",
        ),
    ],
)
def test_a_document_of_another_form_or_damaged_is_refused(tmp_path: Path, stored: bytes, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        Reading(tmp_path, stored, "a.json")
    assert str(caught.value) == f"{tmp_path}/a.json: {problem}"


def test_entries_that_are_no_objects_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    read = Reading(tmp_path, b'[{"text": "a"}, 12, "secret", {"text": "b"}]', "a.json")
    assert read.texts == ["a", "b"]
    assert [problem.split(";")[0] for problem in read.problems] == ["a.json:2: found a number", "a.json:3: found text"]


def test_another_encoding_is_read(tmp_path: Path) -> None:
    stored = json.dumps([{"text": "中文"}], ensure_ascii=False).encode("gb18030")
    assert Reading(tmp_path, stored, "a.json", encoding="gb18030").texts == ["中文"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 7))
def test_a_document_read_in_pieces_is_what_json_reads_whole(
    values: list[object], indent: int | None, is_ascii: bool, chunk: int
) -> None:
    from io import BufferedReader, BytesIO

    class InPieces(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(chunk)

    array = json.dumps(values, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    mapping = json.dumps({str(i): value for i, value in enumerate(values)}, indent=indent).encode()
    assert not isinstance(InPieces(array), BufferedReader)
    assert [value for _, value in _entries(_Window(InPieces(array), Path("a"), "utf-8"))] == json.loads(array)
    assert dict(_entries(_Window(InPieces(mapping), Path("a"), "utf-8"))) == json.loads(mapping)


def test_memory_follows_the_entry_and_not_the_file(tmp_path: Path) -> None:
    row = json.dumps({"text": "x" * 1000}).encode()
    file = tmp_path / "a.json"
    file.write_bytes(b"[" + b",".join([row] * 8000) + b"]")
    with file.open("rb") as opened:
        tracemalloc.start()
        num_entries = sum(1 for _ in _entries(_Window(opened, file, "utf-8")))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert num_entries == 8000
    assert peak_bytes < 1 << 20  # of 8 MB


def test_an_entry_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    stored = b'[{"text": "' + b"x" * (MAX_ROW_BYTES + json_document._CHUNK_BYTES) + b'"}]'
    with pytest.raises(DataError, match="entry 1 is not valid JSON, or longer than 16 MiB"):
        Reading(tmp_path, stored + b" " * (2 * MAX_ROW_BYTES), "a.json")
