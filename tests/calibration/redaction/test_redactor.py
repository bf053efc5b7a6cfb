"""Texts and samples with placeholders: overlaps, counts, conversations, and what stays as it is."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.calibration.redaction import Redactor, RedactSection, open_redactor
from quantpipe.calibration.rows import Sample


def make(**settings: object) -> Redactor:
    return Redactor(RedactSection.model_validate(settings), b"key")


def test_a_value_is_replaced_and_counted() -> None:
    redactor = make()
    text = redactor.redact("邮箱：a@b.cn，卡号 4111 1111 1111 1111")
    assert text.startswith("邮箱：<EMAIL_") and "，卡号 <BANK_CARD_" in text and text.endswith(">")
    assert redactor.counts == {"email": 1, "bank_card": 1}


def test_the_same_value_gets_the_same_placeholder_however_it_is_written() -> None:
    redactor = make()
    assert len({redactor.redact(text) for text in ("13800138000", "138-0013-8000", "+86 138 0013 8000")}) == 1
    assert (
        len({redactor.redact(text) for text in ("A@Example.COM", "a@example.com", "ａ＠ｅｘａｍｐｌｅ．ｃｏｍ")}) == 1
    )
    assert len({redactor.redact(text) for text in ("2001:db8::1", "2001:0db8:0:0:0:0:0:1")}) == 1
    assert redactor.redact("c@example.com") != redactor.redact("a@example.com")


def test_overlapping_spans_become_one_named_by_the_longest() -> None:
    redactor = make(patterns={"ticket": r"T-[0-9]+ from", "mail": "from a@b"})
    (found,) = redactor.find("T-123 from a@b.cn now")
    assert (found.start, found.end, found.rule) == (0, 17, "ticket")


def test_of_equal_spans_the_rule_listed_first_names_it() -> None:
    redactor = make(patterns={"mine": r"\S+@\S+"})
    assert [found.rule for found in redactor.find("a@b.cn")] == ["email"]


def test_text_without_values_is_returned_as_it_is() -> None:
    redactor = make()
    text = "Nothing to see, order 12345, 2024-01-31, v1.2.3"
    assert redactor.redact(text) is text
    assert redactor.counts == {}


def test_off_replaces_nothing() -> None:
    redactor = Redactor(RedactSection.model_validate("off"), b"key")
    assert redactor.redact("a@b.cn 4111 1111 1111 1111") == "a@b.cn 4111 1111 1111 1111"


def test_every_message_of_a_conversation_is_redacted_and_roles_stay() -> None:
    sample = Sample(
        "t.jsonl:4", ({"role": "user", "content": "I am a@b.cn"}, {"role": "assistant", "content": "Hi a@b.cn"})
    )
    redacted = make().redact_sample(sample)
    first, second = redacted.content
    assert isinstance(first, dict) and isinstance(second, dict)
    assert first["content"].removeprefix("I am ") == second["content"].removeprefix("Hi ")
    assert "a@b.cn" not in str(redacted)
    assert (first["role"], second["role"], redacted.where) == ("user", "assistant", "t.jsonl:4")


def test_a_domain_taken_from_a_field_is_redacted_as_well() -> None:
    assert "a@b.cn" not in str(make().redact_sample(Sample("t:1", "text", domain="a@b.cn")))


def test_two_redactors_of_one_set_and_seed_agree_and_a_secret_changes_them(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    plain, keyed = RedactSection(), RedactSection(key_file="secret")
    texts = [
        open_redactor(section, tmp_path, "tickets", seed).redact(" ".join(f"u{i}@b.cn" for i in range(8)))
        for section, seed in ((plain, 0), (plain, 0), (plain, 1), (keyed, 0))
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="a@.1 -:/4kK=\n　１\u200b密码", max_size=80))
def test_found_spans_are_in_order_within_the_text_and_apart(text: str) -> None:
    found = make().find(text)
    assert all(0 <= span.start < span.end <= len(text) for span in found)
    assert all(a.end <= b.start for a, b in pairwise(found))


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="ab ,.\n中文", max_size=60), st.text(alphabet="ab ,.\n中文", max_size=60))
def test_a_card_number_never_survives_whatever_stands_around_it(before: str, after: str) -> None:
    text = make().redact(f"{before} 4111111111111111 {after}")
    assert "4111111111111111" not in text
