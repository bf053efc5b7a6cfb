"""Rows of a JSON Lines file: what they become, and the one line each bad one gets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe.calibration.definition import Fields, JsonlSource
from quantpipe.calibration.jsonl import read_jsonl
from quantpipe.calibration.samples import MOST_SHOWN, RowProblems, Sample
from quantpipe.errors import DataError

Make = Callable[..., Path]
TEXT = Fields(text="text")
MESSAGES = Fields(messages="messages")


def read(folder: Path, fields: Fields, template: Any = None) -> tuple[list[Sample], list[str]]:
    """The samples, and the problems without the folder in front."""
    problems = RowProblems()
    source = JsonlSource(kind="jsonl", path="rows.jsonl", fields=fields, template=template)
    samples = list(read_jsonl(source, folder, problems))
    return samples, [line.removeprefix(f"{folder}/") for line in problems.lines]


def test_text_rows_become_text_with_their_place(make_set: Make) -> None:
    folder = make_set(['{"text": "one", "id": 4}', '{"text": "二"}'])
    samples, problems = read(folder, TEXT)
    assert samples == [Sample(f"{folder}/rows.jsonl:1", "one"), Sample(f"{folder}/rows.jsonl:2", "二")]
    assert problems == []


def test_prompt_and_response_become_a_conversation_or_plain_text(make_set: Make) -> None:
    folder = make_set(['{"q": "Why?", "a": "Because."}'])
    fields = Fields(prompt="q", response="a")
    [conversation], _ = read(folder, fields)
    [plain], _ = read(folder, fields, "none")
    assert conversation.content == (
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
    )
    assert plain.content == "Why?\nBecause."


def test_messages_may_name_their_keys_otherwise(make_set: Make) -> None:
    folder = make_set(['{"talk": [{"who": "user", "says": "hi", "at": 3}]}'])
    [sample], problems = read(folder, Fields(messages="talk", role="who", content="says"))
    assert sample.content == ({"role": "user", "content": "hi"},)
    assert problems == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"", "the row is empty; remove it"),
        (b"  \t", "the row is empty; remove it"),
        (b'{"text": "caf\xe9"}', "byte 14 of the row is not UTF-8; convert the file to UTF-8"),
        ('{"text": "中文"}'.encode("gb18030"), "byte 11 of the row is not UTF-8; convert the file to UTF-8"),
        (b'{"text": "a"', "not valid JSON at column 13: expecting ',' delimiter; one object per row"),
        (b'["a"]', "found a list; each row is an object with the fields that set.yaml names"),
        (b"null", "found empty (null); each row is an object with the fields that set.yaml names"),
        (b'{"txt": "a", "id": 1}', "no field 'text'; there are: id, txt"),
        (b"{}", "no field 'text'; there are: none"),
        (b'{"text": " "}', "field 'text' is empty; fill it or remove the row"),
        (b'{"text": null}', "field 'text' is empty (null); it must be text"),
        (b'{"text": 7}', "field 'text' is a number; it must be text"),
        (
            b'{"text": "\\ud83d"}',
            "field 'text' holds half of a surrogate pair; escape the character as two \\u codes",
        ),
        (b"[" * 100_000, "nested too deeply; one flat object per row"),
    ],
)
def test_unusable_text_row_is_one_line_with_file_and_row(make_set: Make, row: bytes, problem: str) -> None:
    samples, problems = read(make_set([b'{"text": "good"}', row, b'{"text": "also good"}']), TEXT)
    assert [sample.content for sample in samples] == ["good", "also good"]
    assert problems == [f"rows.jsonl:2: {problem}"]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "field 'messages' is an empty list; it must be a list of messages"),
        ("hi", "field 'messages' is text; it must be a list of messages"),
        (["hi"], "messages[0] is text; it must be an object with a role and a content"),
        ([{"content": "hi"}], "messages[0]: no field 'role'; there are: content"),
        ([{"role": "user", "content": ""}], "messages[0]: field 'content' is empty; fill it or remove the row"),
        ([{"role": "bot", "content": "hi"}], "messages[0]: unknown role; allowed: system, user, assistant, tool"),
    ],
)
def test_unusable_conversation_names_the_message(make_set: Make, messages: Any, problem: str) -> None:
    samples, problems = read(make_set([json.dumps({"messages": messages})]), MESSAGES)
    assert samples == []
    assert problems == [f"rows.jsonl:1: {problem}"]


def test_byte_order_mark_is_no_part_of_the_first_row(make_set: Make) -> None:
    samples, problems = read(make_set([b'\xef\xbb\xbf{"text": "one"}']), TEXT)
    assert [sample.content for sample in samples] == ["one"]
    assert problems == []


def test_problems_never_show_what_a_row_says(make_set: Make) -> None:
    rows = ['{"text": "secret-a"', '{"texts": "secret-b"}', '{"text": ["secret-c"]}', '"secret-d"']
    _, problems = read(make_set(rows), TEXT)
    assert len(problems) == 4
    assert "secret" not in "".join(problems)


def test_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl: no such file or directory; correct the path in set.yaml"):
        read(tmp_path, TEXT)


def test_many_bad_rows_show_the_first_and_count_the_rest() -> None:
    problems = RowProblems()
    for number in range(1, 1_300):
        problems.add(f"rows.jsonl:{number}", "bad")
    with pytest.raises(DataError) as caught:
        problems.raise_if_any()
    lines = str(caught.value).splitlines()
    assert lines[0] == "rows.jsonl:1: bad"
    assert len(lines) == MOST_SHOWN + 1
    assert lines[-1] == "... and 1,289 more rows like these"
