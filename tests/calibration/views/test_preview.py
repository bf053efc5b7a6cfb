from pathlib import Path

import pytest

from quantpipe.calibration.calibration_set import Document
from quantpipe.calibration.definition.set_definition import SetDefinition, load_set
from quantpipe.calibration.rows import Sample
from quantpipe.calibration.views.preview import MOST_CHARS, preview_text, show_document, show_sample

SET = """
version: 1
name: tiny
redact: {redact}
sources:
  - path: rows.jsonl
"""


@pytest.fixture
def unredacted(tmp_path: Path) -> SetDefinition:
    (tmp_path / "set.yaml").write_text(SET.format(redact="off"))
    return load_set(tmp_path)


def document(num_tokens: int = 9, num_tokens_used: int = 9) -> Document:
    return Document("rows.jsonl:4", "rows.jsonl", "rows.jsonl", "en", num_tokens, num_tokens_used)


def test_samples_are_redacted_even_where_the_set_redacts_nothing(unredacted: SetDefinition) -> None:
    messages = ({"role": "user", "content": "I am jo@example.com"}, {"role": "assistant", "content": "Hello"})
    shown = show_sample(Sample("rows.jsonl:3", messages, language="en"), unredacted, seed=0)
    assert shown.title == "rows.jsonl:3, en"
    assert shown.text.startswith("[user] I am <EMAIL_")
    assert shown.text.endswith("\n[assistant] Hello")
    assert "jo@example.com" not in show_document(document(), "I am jo@example.com", unredacted, seed=0).text
    assert "jo@example.com" not in show_document(document(), "I am jo@example.com", None, seed=0).text


def test_patterns_of_the_set_are_redacted_too(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").write_text(SET.format(redact="{patterns: {order_id: 'ORD-[0-9]{8}'}}"))
    shown = show_sample(Sample("rows.jsonl:3", "see ORD-55512349"), load_set(tmp_path), seed=0)
    assert shown.text.startswith("see <ORDER_ID_")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("write to jo.doe@exam", "write to"),
        ("my card 4539 5787 6362 14", "my card"),
        ("call (030) 123-45", "call"),
        ("你" * 100, "你" * 20),
    ],
)
def test_a_value_that_the_end_of_a_block_cut_in_two_is_not_shown(
    unredacted: SetDefinition, text: str, shown: str
) -> None:
    assert show_document(document(9, 5), text, unredacted, seed=0).text == shown


def test_long_samples_are_cut_and_say_how_long_they_are(unredacted: SetDefinition) -> None:
    shown = show_sample(Sample("rows.jsonl:3", "word " * 1000), unredacted, seed=0)
    assert len(shown.text) < MOST_CHARS + 40
    assert shown.text.endswith("... (5,000 characters)")


def test_each_sample_stands_under_its_title(unredacted: SetDefinition) -> None:
    shown = show_document(document(), "some text", unredacted, seed=0)
    assert preview_text((shown,)) == "--- rows.jsonl:4, en, 9 of 9 tokens\nsome text"
