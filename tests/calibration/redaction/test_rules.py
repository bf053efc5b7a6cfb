"""The table of rules, and that none of them costs more than in proportion to the text."""

import time

import pytest

from quantpipe.calibration.redaction import RULES, Redactor, RedactSection
from quantpipe.calibration.redaction.section import RULE_NAMES

# What each repeats could make a search start over at every sign.
HOSTILE = (
    "a@", "a@b.", "@", "1 ", "12-", "(1", "+1 ", "138 ", "4111 ", "1.2.3.4 ", "1.", "1:", "2001:db8::", "DE89 ", "DE89",
    "://a:", "http://a:b", "?token=", "key=", "secret", "password is ", "eyJaaaaaaaa.", "sk-a", "SG.a",
    "-----BEGIN PRIVATE KEY-----\n", "basic a", "(at)", "张@公司.", "１　", "1\u200b", "\"a@", "\n1", "密码a1",
    "a [at] b [dot] ", "token=a1", "&(",
)  # fmt: skip


def seconds(redactor: Redactor, text: str) -> float:
    best = float("inf")
    for _ in range(2):
        started = time.process_time()
        redactor.find(text)
        best = min(best, time.process_time() - started)
    return best


def test_the_table_lists_every_rule_of_the_section_in_its_order() -> None:
    assert tuple(RULES) == RULE_NAMES


@pytest.mark.parametrize("part", HOSTILE)
def test_work_grows_with_the_text_and_no_faster(part: str) -> None:
    """Four times the text takes about four times as long; sixteen times would be quadratic."""
    redactor = Redactor(RedactSection(), b"key")
    redactor.find("warm 13800138000, +1 212 555 0123, GB29NWBK60161331926819")
    short = (part * 1000)[:1000]
    long = (part * 4000)[:4000]
    noise_s = 0.02  # of a busy machine, on times of a few milliseconds
    assert seconds(redactor, long) <= 9 * seconds(redactor, short) + noise_s


def test_empty_and_blank_texts_hold_nothing() -> None:
    redactor = Redactor(RedactSection(), b"key")
    for text in ("", " ", "\n\n", "\u200b", "@", ":", ".", "-"):
        assert redactor.find(text) == []
