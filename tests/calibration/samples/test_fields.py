"""From rows to samples: what the mapping makes of them, and the one reason each bad row gets."""

import json
from typing import Any

import pytest

from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.rows import Row, RowError, Sample, sample_text
from quantpipe.calibration.samples.fields import to_sample

IMAGE = "m[0]: field 'content' has a content part of type image_url; only parts of type text can be used"
REASONS: list[tuple[dict[str, Any], str]] = [
    ({"text": ""}, "field is empty"),
    ({"text": 1}, "field is not text"),
    ({}, "no field"),
    ({"text": "\0"}, "NUL character"),
]


def source_of(**keys: Any) -> FileSource:
    return FileSource.model_validate({"path": "rows.jsonl", **keys})


def sample_of(values: dict[str, Any], **keys: Any) -> Sample:
    return to_sample(Row("rows.jsonl:7", values), source_of(**keys), index=2)


def reason_of(values: dict[str, Any], **keys: Any) -> str:
    with pytest.raises(RowError) as caught:
        sample_of(values, **keys)
    return str(caught.value)


def test_a_sample_knows_where_it_stands_and_what_is_said_about_it() -> None:
    values = {"text": "hi", "lang": " zh ", "topic": "cards", "user": 17.0}
    keys = {"language": {"field": "lang"}, "domain": {"field": "topic"}, "group": "user"}
    assert sample_of(values, **keys) == Sample("rows.jsonl:7", "hi", 2, "17", "zh", "cards")
    assert sample_of(values, language="en", domain="bank") == Sample("rows.jsonl:7", "hi", 2, None, "en", "bank")
    assert sample_of(values) == Sample("rows.jsonl:7", "hi", 2, None, "und", "rows.jsonl")
    assert sample_of(values, language="auto").language == "und"


@pytest.mark.parametrize("missing", [{"text": "hi"}, {"text": "hi", "lang": None, "topic": "", "user": " "}])
def test_rows_without_a_label_or_group_have_the_usual_one(missing: dict[str, Any]) -> None:
    keys = {"language": {"field": "lang"}, "domain": {"field": "topic"}, "group": "user"}
    assert sample_of(missing, **keys) == Sample("rows.jsonl:7", "hi", 2, None, "und", "rows.jsonl")


def test_prompt_and_response_become_a_conversation_or_plain_text() -> None:
    values = {"q": "Why?", "a": "Because.", "s": "Be brief."}
    fields = {"prompt": "q", "response": "a", "system": "s"}
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
    )
    assert sample_of(values, fields=fields).content == messages
    assert sample_of({**values, "s": None}, fields=fields).content == messages[1:]
    assert sample_of(values, fields=fields, template="none").content == "Be brief.\nWhy?\nBecause."
    assert sample_text(sample_of(values, fields=fields)) == "Be brief.\nWhy?\nBecause."


def test_several_fields_are_joined_by_a_blank_line_and_lists_by_line_breaks() -> None:
    values = {"title": "T", "empty": " ", "none": None, "parts": ["a", "b"], "meta": {"x": {"y": "deep"}}, "m.z": "dot"}
    fields = {"text": ["title", "empty", "none", "parts", "meta.x.y", "m.z"]}
    assert sample_of(values, fields=fields).content == "T\n\na\nb\n\ndeep\n\ndot"


def test_messages_may_name_their_keys_and_speakers_otherwise() -> None:
    values = {"talk": [{"who": "客服", "says": "您好", "at": 3}, {"who": " user ", "says": ["a", "b"]}]}
    fields = {"messages": "talk", "role": "who", "content": "says", "roles": {"客服": "assistant"}}
    assert sample_of(values, fields=fields).content == (
        {"role": "assistant", "content": "您好"},
        {"role": "user", "content": "a\nb"},
    )


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"txt": "a", "id": 1}, "no field 'text'; there are: id, txt"),
        ({}, "no field 'text'; there are: none"),
        ({"text": " "}, "field 'text' is empty; fill it, or leave such rows out with bad_rows: drop"),
        ({"text": None}, "field 'text' is empty; fill it, or leave such rows out with bad_rows: drop"),
        ({"text": []}, "field 'text' is empty; fill it, or leave such rows out with bad_rows: drop"),
        ({"text": 7}, "field 'text' is a number; it must be text"),
        ({"text": {"a": "secret"}}, "field 'text' is an object; it must be text"),
        ({"text": ["a", {"b": 1}]}, "field 'text' is a list with an object; it must be text or a list of texts"),
        ({"text": "\ud83d"}, "field 'text' holds half of a surrogate pair; escape the character as two \\u codes"),
        ({"text": "a\0b"}, "field 'text' holds a NUL character; remove it, or correct the file's encoding"),
    ],
)
def test_a_row_without_text_says_why(values: dict[str, Any], reason: str) -> None:
    assert reason_of(values) == reason


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "field 'm' is an empty list; it must be a list of messages"),
        ("hi", "field 'm' is text that is not JSON; it must be a list of messages, or one written as JSON"),
        ('{"a": "secret"}', "field 'm' is an object written as JSON; it must be a list of messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "secret"}]}], IMAGE),
        ([{"role": "user", "content": [{"type": "secret"}]}], IMAGE.replace("of type image_url", "of another type")),
        (["hi"], "m[0] is text; it must be an object with a role and a content"),
        ([{"content": "hi"}], "m[0]: no field 'role'; there are: content; fields.role names the key that holds it"),
        ([{"role": "user"}], "m[0]: no field 'content'; there are: role; fields.content names the key that holds it"),
        (
            [{"role": None, "content": "hi"}],
            "m[0]: field 'role' is empty; fill it, or leave such rows out with bad_rows: drop",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "secret", "content": "hi"}],
            "m[1]: unknown role; allowed: system, user, assistant, tool, bot; fields.roles says what others mean",
        ),
    ],
)
def test_an_unusable_conversation_names_the_message(messages: Any, reason: str) -> None:
    assert reason_of({"m": messages}, fields={"messages": "m", "roles": {"bot": "assistant"}}) == reason


def test_each_kind_of_bad_row_is_counted_apart() -> None:
    for values, reason in REASONS:
        with pytest.raises(RowError) as caught:
            sample_of(values)
        assert caught.value.reason == reason


def test_a_group_is_a_single_value() -> None:
    assert reason_of({"text": "a", "user": ["x"]}, group="user") == "field 'user' is a list; it must be a single value"


def test_names_of_fields_that_look_like_data_are_not_shown() -> None:
    reason = reason_of({"anna@example.com": 1, "x" * 41: 2, "13800138000": 3, "bell\a": 4})
    assert reason == "no field 'text'; there are: 4 fields (names that may be data are not shown)"


def test_messages_written_as_json_and_content_in_parts_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    expected = ({"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"})
    for found in (messages, json.dumps(messages)):
        assert sample_of({"m": found}, fields={"messages": "m"}).content == expected
