"""Bank card numbers: the ranges and lengths of issuers, the check digit (Luhn), a way of writing that cards have."""

import re
from collections.abc import Iterator, Sequence

from quantpipe.calibration.redaction.scan import Group, Run, Scan, Span, layout, windows

# Lowest and highest first digits (of equal number), and the lengths that cards of this range have.
_ISSUERS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("4", "4", (13, 16, 19)),  # Visa
    ("51", "55", (16,)),  # Mastercard
    ("2221", "2720", (16,)),
    ("34", "34", (15,)),  # American Express
    ("37", "37", (15,)),
    ("300", "305", (14, 16)),  # Diners Club
    ("36", "36", (14, 16)),
    ("38", "39", (14, 16)),
    ("6011", "6011", (16, 19)),  # Discover
    ("644", "649", (16, 19)),
    ("65", "65", (16, 19)),
    ("3528", "3589", (16, 19)),  # JCB
    ("62", "62", (16, 17, 18, 19)),  # UnionPay
    ("81", "81", (16, 17, 18, 19)),
    ("2200", "2204", (16, 17, 18, 19)),  # Mir
    ("50", "50", (16, 19)),  # Maestro and local debit cards
    ("56", "58", (16, 19)),
    ("60", "60", (16, 19)),
    ("63", "63", (16, 19)),
    ("67", "67", (16, 19)),
    ("9558", "9559", (16, 19)),  # Chinese debit cards from before UnionPay
)
_LAYOUTS = re.compile(r"(?:\d+|(?:4,){3}\d|(?:4,){4}[1-3]|4,6,[45]|6,1[0-3]|8,8|4,4,8|6,6,4|5,5,6|4,12),")
_CONTEXT = re.compile(
    r"\b(?:cards?|visa|credit|debit|mastercard|amex|unionpay|pan|account|acct|iin)\b|卡|银行|账号|帐号|账户"
)
_COMMON = {14: ("3",), 15: ("3",), 16: ("2", "3", "4", "5", "6", "8", "9"), 17: ("62",), 18: ("62",), 19: ("62", "955")}


def find_bank_cards(scan: Scan) -> Iterator[Span]:
    """Card numbers of 13 to 19 digits, also in groups or over a line break.

    One random number in ten has a right check digit: a long number without separators of a length that few cards of its
    range have (13 digits, 19 digits that are not Chinese) only counts near a word for a card or an account.
    """
    for run in scan.long_runs:
        first = 0
        while first < len(run):
            groups = _card_at(scan, run, first)
            if groups:
                yield Span(groups[0].start, groups[-1].end, scan.digits(groups))
            first += max(1, len(groups))


def _card_at(scan: Scan, run: Run, first: int) -> Sequence[Group]:
    for groups in windows(run, first, 13, 19):
        start, end = groups[0].start, groups[-1].end
        digits = scan.digits(groups)
        if not _has_issuer(digits) or not _is_written_like_a_card(groups):
            continue
        if not scan.stands_alone(start, end) or _is_part_of_decimal(run, first, len(groups)):
            continue
        if not digits.startswith(_COMMON.get(len(digits), ("-",))) and not _CONTEXT.search(scan.before(start)):
            continue
        if _check_digit_fits(digits):
            return groups
    return ()


def _has_issuer(digits: str) -> bool:
    return (
        any(low <= digits[: len(low)] <= high and len(digits) in lengths for low, high, lengths in _ISSUERS)
        and len(set(digits)) > 1
    )


def _is_written_like_a_card(groups: Sequence[Group]) -> bool:
    if any(not set(group.gap) <= set(" \t-\r\n>") for group in groups[1:]):
        return False
    broken = "".join(f"{size}," for size in layout(groups))
    whole = "".join(f"{group.num_digits}," for group in groups)
    return bool(_LAYOUTS.fullmatch(broken) or _LAYOUTS.fullmatch(whole))


def _is_part_of_decimal(run: Run, first: int, num_groups: int) -> bool:
    last = first + num_groups
    return (first > 0 and run[first].gap == ".") or (last < len(run) and run[last].gap == ".")


def _check_digit_fits(digits: str) -> bool:
    from stdnum import luhn

    return bool(luhn.is_valid(digits))
