"""The kinds of source: what contradicts what, and what follows from what is left out."""

from typing import Any

import pytest
from pydantic import ValidationError

from quantpipe.calibration.definition.sources import ENDINGS, FileSource, PythonStdlibSource, SelfSource


def source_of(**keys: Any) -> FileSource:
    return FileSource.model_validate({"path": "a.csv", **keys})


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"fields": {"prompt": "q"}}, "found prompt; allowed: text, or messages, or prompt with response"),
        ({"fields": {"text": "t", "messages": "m"}}, "found text and messages; allowed: text, or messages"),
        ({"fields": {"text": "t", "system": "s"}}, "system goes with prompt and response"),
        ({"fields": {"text": []}}, "found an empty list; allowed: a field name, or a list of field names"),
        ({"fields": {"text": 3}}, "found 3 (a whole number); allowed: a field name"),
        ({"fields": {"messages": "m"}, "template": "none"}, "template none cannot render messages"),
        ({"template": "tokenizer"}, "template tokenizer needs messages, or prompt and response"),
        ({"max_group_frac": 0.1}, "max_group_frac needs a group"),
        ({"drop_columns": ["text"]}, "'text' is in drop_columns and used too"),
        ({"drop_columns": ["id"], "group": "id"}, "'id' is in drop_columns and used too"),
        ({"drop_columns": ["x"], "filter": {"where": {"x": 1}}}, "'x' is in drop_columns and used too"),
        ({"path": "a.json", "delimiter": ";"}, "delimiter is for csv files, this is json"),
        ({"delimiter": '"'}, "delimiter cannot be a quote or a line break"),
        ({"text_rows": "line"}, "text_rows is for text files, this is csv"),
        ({"path": "a.txt", "fields": {"text": "body"}}, "a text file has one field, 'text'"),
        ({"encoding": "utf8x"}, "unknown encoding 'utf8x'; such as utf-8, gb18030, cp1252"),
        ({"encoding": "utf-16"}, "utf-16 cannot be read row by row; convert the file to UTF-8"),
        ({"encoding": "base64"}, "unknown encoding 'base64'"),
        ({"encoding": []}, "found an empty list; allowed: the name of an encoding, or a list of names"),
        ({"path": "a.json", "encoding": ["utf-8", "gb18030"]}, "a JSON document has one encoding"),
        ({"path": "a.parquet", "encoding": "gb18030"}, "a Parquet file says itself how text is encoded"),
        ({"path": "a.zip"}, "the ending of 'a.zip' names no format"),
        ({"language": {"feild": "x"}}, "feild"),
        ({"language": 5}, "found 5 (a whole number); allowed: a name, or a mapping {field: <name of a field>}"),
        ({"domain": "auto"}, "'auto' is for languages"),
        ({"filter": {"min_chars": 5, "max_chars": 4}}, "min_chars 5 is more than max_chars 4"),
        ({"filter": {"where": {"x": {"a": 1}}}}, "found a mapping; allowed: a value, or a list of values"),
    ],
)
def test_what_contradicts_itself_is_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        source_of(**keys)
    assert problem in str(caught.value)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_format_follows_from_the_ending_compressed_or_not(ending: str) -> None:
    for path in (f"x/a{ending}", f"a{ending}.gz", f"A{ending.upper()}"):
        assert FileSource(path=path).format_of(path) == ENDINGS[ending]


def test_encodings_are_one_or_several() -> None:
    assert source_of(encoding="GBK").encoding == ("gbk",)
    assert source_of(encoding=["UTF8", "gb18030"]).encoding == ("utf-8", "gb18030")


def test_a_group_may_give_a_twentieth_unless_said_otherwise() -> None:
    assert source_of().group_frac == 1.0
    assert source_of(group="id").group_frac == 0.05
    assert source_of(group="id", max_group_frac=0.5).group_frac == 0.5


def test_only_conversations_use_the_chat_template_by_themselves() -> None:
    assert not source_of().uses_template
    assert source_of(fields={"messages": "m"}).uses_template
    assert not source_of(fields={"prompt": "q", "response": "a"}, template="none").uses_template
    with_file = source_of(fields={"messages": "m"}, template="chat.jinja")
    assert not with_file.uses_template
    assert with_file.template_file == "chat.jinja"


@pytest.mark.parametrize("kind", [PythonStdlibSource, SelfSource])
def test_kinds_without_fields_take_no_labels_from_fields(kind: Any) -> None:
    keys = {"kind": "self"} if kind is SelfSource else {"kind": "python_stdlib", "content": "topics"}
    assert kind.model_validate({**keys, "language": "en"}).known_language == "en"
    with pytest.raises(ValidationError, match="this kind has no fields, found field 'lang'"):
        kind.model_validate({**keys, "language": {"field": "lang"}})
