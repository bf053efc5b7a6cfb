"""What each rule decides where a line alone does not tell: one table per rule, and numbers checked by other code."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpipe.calibration.redaction import Redactor, RedactSection

CARD_PREFIXES = ("4", "51", "2221", "3528", "6011", "6222")


def found(text: str, **settings: object) -> list[tuple[str, str]]:
    redactor = Redactor(RedactSection.model_validate(settings), b"key")
    return [(span.rule, text[span.start : span.end]) for span in redactor.find(text)]


def luhn_digit(digits: str) -> str:
    doubled = [int(digit) * (2 if i % 2 == 0 else 1) for i, digit in enumerate(reversed(digits))]
    return str(-sum(number // 10 + number % 10 for number in doubled) % 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("邮箱：a@b.cn", ["a@b.cn"]),
        ("发给a@b.cn谢谢", ["a@b.cn"]),
        ("张三@公司.cn 收", ["张三@公司.cn"]),
        ("x=a@b.cn&y", ["a@b.cn"]),
        ("a@b", []),
        ("git@github.com:x/y", []),
        ("x@w.transpose(0, 1)", []),
        ("write to a@b.com(work)", ["a@b.com"]),
        ("logo@2x.png", []),
    ],
)
def test_email(text: str, expected: list[str]) -> None:
    assert found(text) == [("email", value) for value in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("13800138000", ["13800138000"]),
        ("138001380001", []),
        ("x13800138000", []),
        ("13800138000.50", []),
        ("订单号：13800138000", []),
        ("订单电话：13800138000", ["13800138000"]),
        ("4155550188", []),
        ("call 4155550188", ["4155550188"]),
        ("12-415-555-0188", []),
        ("(13800138000)", ["13800138000"]),
        ("2023-11-16 18:17:04.4249540", []),
        ("138 0013 8000 139 1234 5678", ["138 0013 8000", "139 1234 5678"]),
    ],
)
def test_phone(text: str, expected: list[str]) -> None:
    assert found(text) == [("phone", value) for value in expected]


def test_numbers_of_a_region_are_found_where_the_section_names_it() -> None:
    text = "Rufen Sie 030 901820 an oder 06 12 34 56 78"
    assert found(text, regions=["US"]) == []
    assert found(text, regions=["FR"]) == [("phone", "06 12 34 56 78")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.2.3.4", ["1.2.3.4"]),
        ("v1.2.3.4 and 1.2.3.5", []),
        ("version 1.2.3.4", []),
        ("版本号：1.2.3.4", []),
        ("第1.2.3.4条", []),
        ("1.2.3.4.5", []),
        ("1.2.3.400", []),
        ("127.0.0.1 0.0.0.0 255.255.255.0", []),
        ("fe80::1%eth0, ok", ["fe80::1%eth0"]),
        ("[2001:db8::1]:443", ["2001:db8::1"]),
        ("地址2001:db8::1。", ["2001:db8::1"]),
        ("x[::2] a::b 12:30:45 ::1 std::dec", []),
    ],
)
def test_ip(text: str, expected: list[str]) -> None:
    assert found(text) == [("ip", value) for value in expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://u:p@h.cn/", [("url_credentials", "u:p")]),
        ("https://h.cn/?token=", []),
        ("?password=abcd&x=1", [("url_credentials", "abcd")]),
        ("?key=name", []),
        ('{"api_key":"q8Zk2LmP0xT7vB4nYc6R"}', [("api_key", "q8Zk2LmP0xT7vB4nYc6R")]),
        ('{\\"api_key\\": \\"q8Zk2LmP0xT7vB4nYc6R\\"}', [("api_key", "q8Zk2LmP0xT7vB4nYc6R")]),
        ("password: required", []),
        ("我的pw是kitty777，key是q8Zk2LmP0xT7vB4nYc6R", [("api_key", "kitty777"), ("api_key", "q8Zk2LmP0xT7vB4nYc6R")]),
        ('"keywords": "2010-2022_Biology_MCQs", monkey: a1b2c3d4e5f6g7h8', []),
        ("密码：abc123（初始）", [("api_key", "abc123")]),
        ("token = make_token12345678(x)", []),
        ("the sha1 is da39a3ee5e6b4b0d3255bfef95601890afd80709", []),
    ],
)
def test_secrets(text: str, expected: list[tuple[str, str]]) -> None:
    assert found(text) == expected


def test_a_private_key_goes_to_its_last_line_though_its_end_is_missing() -> None:
    begin, end = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
    assert found(f"x {begin}\nAbc+/1==\n{end} y") == [("api_key", f"{begin}\nAbc+/1==\n{end}")]
    (rule, value), *rest = found(f"{begin}\nAbc+/1==\n。后面的话")
    assert (rule, rest) == ("api_key", [])
    assert "Abc+/1==" in value


def test_a_long_value_is_replaced_to_its_end() -> None:
    value = "q8Zk2LmP0xT7vB4nYc6R" * 40
    assert found(f"api_key={value} end") == [("api_key", value)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CARD_PREFIXES), st.text("0123456789", min_size=14, max_size=14), st.sampled_from(["", " ", "-"]))
def test_a_number_of_an_issuer_is_a_card_exactly_where_its_check_digit_fits(
    prefix: str, rest: str, separator: str
) -> None:
    digits = (prefix + rest)[:15]
    right = luhn_digit(digits)
    for last in "0123456789":
        number = digits + last
        text = separator.join(number[i : i + 4] for i in range(0, 16, 4))
        assert (("bank_card", text) in found(text)) == (last == right)


@settings(max_examples=40, deadline=None)
@given(st.dates(), st.integers(0, 999), st.sampled_from(["110101", "440306", "650103"]))
def test_an_identity_number_is_found_exactly_where_its_check_sign_fits(birth: object, order: int, place: str) -> None:
    digits = f"{place}{str(birth).replace('-', '')}{order:03}"
    weights = [2**power % 11 for power in range(17, 0, -1)]
    right = "10X98765432"[sum(int(digit) * weight for digit, weight in zip(digits, weights, strict=True)) % 11]
    is_in_range = 1880 <= int(digits[6:10]) <= 2100
    for sign in "0123456789X":
        number = f"证件 {digits}{sign}"
        assert (("cn_id_card", f"{digits}{sign}") in found(number)) == (sign == right and is_in_range)


@settings(max_examples=40, deadline=None)
@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ", min_size=4, max_size=4), st.text("0123456789", min_size=14, max_size=14))
def test_an_account_number_is_found_exactly_where_its_check_digits_fit(bank: str, account: str) -> None:
    number = "".join(str(int(char, 36)) for char in f"{bank}{account}GB00")
    right = f"{98 - int(number) % 97:02}"
    for check in (right, f"{(int(right) + 1) % 97:02}"):
        text = f"GB{check}{bank}{account}"
        assert (("iban", text) in found(text)) == (check == right)
