"""Placeholders: typed, equal for equal values, different for another key, and few bits on purpose."""

import re
from pathlib import Path

import pytest

from quantpipe.calibration.redaction.placeholders import placeholder, placeholder_key, read_secret
from quantpipe.errors import DataError


def test_a_placeholder_names_its_rule_and_sixteen_bits() -> None:
    assert re.fullmatch(r"<BANK_CARD_[0-9a-f]{4}>", placeholder("bank_card", "4111111111111111", b"k"))


def test_equal_values_share_a_placeholder_and_types_do_not() -> None:
    assert placeholder("email", "a@b.cn", b"k") == placeholder("email", "a@b.cn", b"k")
    assert placeholder("email", "a@b.cn", b"k")[7:] != placeholder("ip", "a@b.cn", b"k")[4:]


def test_the_key_follows_from_name_seed_and_secret() -> None:
    keys = [
        placeholder_key("a", 0),
        placeholder_key("b", 0),
        placeholder_key("a", 1),
        placeholder_key("a", 0, b"s" * 16),
    ]
    assert len(set(keys)) == 4
    assert placeholder_key("a", 0) == keys[0]
    assert len({placeholder("phone", "+8613800138000", key) for key in keys}) > 1


def test_many_values_share_each_placeholder() -> None:
    seen = {placeholder("phone", str(number), b"k") for number in range(2000)}
    assert len(seen) < 2000


def test_a_secret_that_is_missing_or_short_is_refused_without_showing_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(DataError, match=r"no such file or directory; redact\.key_file names it"):
        read_secret(file)
    file.write_bytes(b"hunter2")
    with pytest.raises(DataError, match=r"holds 7 bytes; redact\.key_file needs at least 16") as caught:
        read_secret(file)
    assert "hunter2" not in str(caught.value)
    file.write_bytes(b"x" * 32)
    assert read_secret(file) == b"x" * 32
