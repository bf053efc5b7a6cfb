"""International bank account numbers: a country's exact length and form, and the check digits (mod 97)."""

import re
from collections.abc import Iterator

from quantpipe.calibration.redaction.scan import WORD, Scan, Span

# How long an account number of each country is, check digits and all: the registry of IBANs.
_BY_LENGTH = {
    15: "NO", 16: "BE", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK", 21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL", 24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "LY PT ST", 26: "IS TR", 27: "BI DJ FR GR IT MC MR SM", 28: "AL AZ BY CY DO GT HN HU LB NI PL SV",
    29: "BR EG PS QA UA", 30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
}  # fmt: skip
_LENGTHS = {country: length for length, countries in _BY_LENGTH.items() for country in countries.split()}
_SEPARATOR = re.compile(r"[ \-]|[ ]?\r?\n[ \t>]{0,4}")


def find_ibans(scan: Scan) -> Iterator[Span]:
    """Account numbers of a known country, in one piece or in groups, in capitals or not."""
    for run in scan.runs:
        for group in run:
            start = group.start - 2
            if start < 0 or group.num_digits < 2 or (start and scan.text[start - 1] in WORD):
                continue
            length = _LENGTHS.get(scan.text[start : group.start].upper())
            found = _take(scan.text, start, length) if length else None
            if found is not None and _is_valid(found[1]):
                yield Span(start, *found)


def _take(text: str, start: int, length: int) -> tuple[int, str] | None:
    """The end and the signs of ``length`` letters and digits from ``start``, single separators left out."""
    taken: list[str] = []
    at = start
    while at < len(text) and len(taken) < length:
        char = text[at]
        if char.isascii() and char.isalnum():
            taken.append(char.upper())
            at += 1
        elif separator := _SEPARATOR.match(text, at):
            at = separator.end()
        else:
            return None
    is_whole = len(taken) == length and not (at < len(text) and text[at].isascii() and text[at].isalnum())
    return (at, "".join(taken)) if is_whole else None


def _is_valid(number: str) -> bool:
    from stdnum import iban

    return bool(iban.is_valid(number, check_country=False))
