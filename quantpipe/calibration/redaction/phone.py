"""Telephone numbers, checked by the ``phonenumbers`` library where the way of writing makes a number likely.

With a country code (+ or 00) any country counts; without one the regions of the section. Bare digits count where they
are a Chinese mobile number, or after a word for a telephone.
"""

import re
from collections.abc import Iterator, Sequence

from quantpipe.calibration.redaction.scan import FEWEST_DIGITS, Group, Run, Scan, Span, layout, windows

_CONTEXT = re.compile(
    r"\b(?:tele?|phones?|telephone|call(?:ed|ing|s)?|callback|mobile|cell|cellphone|fax|whatsapp|sms|text(?:ed)?|contact|"
    r"reach|hotline|dial|ring|rang|landline|number is)\b|"
    r"电话|電話|手机|手機|联系|聯繫|致电|拨打|撥打|传真|座机|热线|来电|号码是"
)
_NOT_A_PHONE = re.compile(
    r"(?:\border|\binvoice|\btracking|\bserial|\bsku|\bisbn|\bref|\breference|\bcase|\bticket|\bid|\bsn|\bno|订单|訂單|单号|運單|编号|編號|"
    r"流水|序列|条码|快递|运单|工号|批次|qq)(?:号码|号|號|码|number|no|id)?[\s.#:=是为\"']{0,4}\Z"
)
Sizes = tuple[tuple[int, ...], ...]  # of the groups, with and without those parted by a line break as one
_LOCAL_LAYOUTS = ((7,), (8,), (3, 4), (4, 4))
# In how many groups of what size numbers are written that nothing announces.
_CHINESE_MOBILE = frozenset({(11,), (3, 4, 4), (3, 8), (7, 4), (3, 3, 5), (4, 3, 4), (5, 6), (4, 4, 3)})
_CHINESE_HOTLINE = frozenset({(3, 3, 4), (3, 4, 3), (3, 7)})
_NORTH_AMERICAN = frozenset({(3, 3, 4), (1, 3, 3, 4), (3, 7)})
_KNOWN_LAYOUTS = frozenset({"CN", "GB", "US", "CA"})  # what _is_likely knows is all there is
_MOST_DIGITS = 17  # 00, a country code and a number


def find_phones(scan: Scan) -> Iterator[Span]:
    """Numbers of 7 to 15 digits that exist in the plan of their country."""
    for run in scan.long_runs:
        first = 0
        while first < len(run):
            found = _phone_at(scan, run, first)
            if found is None:
                first += 1
                continue
            groups, start, value = found
            end = groups[-1].end
            if scan.text[start] == "(" and ")" not in scan.text[start:end]:
                start += 1  # the bracket is around more than the number
            yield Span(start, end, value)
            first += len(groups)


def _phone_at(scan: Scan, run: Run, first: int) -> tuple[Sequence[Group], int, str] | None:
    start = _start_with_signs(scan.text, run[first].start)
    has_plus = "+" in scan.text[start : run[first].start]
    if not has_plus and first and run[first].gap.strip() == ".":
        return None  # decimals; numbers with dots are taken from their first group
    if not scan.stands_alone(run[first].start, run[first].end) and not _letters_are_context(scan, run[first]):
        return None
    context = bool(_CONTEXT.search(scan.before(start)))
    for groups in windows(run, first, FEWEST_DIGITS, _MOST_DIGITS):
        if not scan.stops_at(groups[-1].end) or (not has_plus and _is_in_chain(run, first, groups)):
            continue
        if has_plus:
            without_trunk = scan.text[start : groups[-1].end].replace("(0)", "")
            value = _international("".join(re.findall("[0-9]+", without_trunk)))
        else:
            value = _national(scan, run, groups, scan.digits(groups), context)
        if value is not None:
            return groups, start, value
    return None


def _is_in_chain(run: Run, first: int, groups: Sequence[Group]) -> bool:
    """Whether the groups are the end of a longer chain of numbers, or the whole part of a decimal."""
    if len(groups) > 1:
        return groups[0].gap in ("-", "/") and groups[0].gap == groups[1].gap
    return first + 1 < len(run) and run[first + 1].gap == "."


def _start_with_signs(text: str, start: int) -> int:
    """Where a number begins with the plus and brackets in front of its digits."""
    while start > 0 and text[start - 1] in "+(":
        start -= 1
        if text[start] == "+":
            return start - 1 if start > 0 and text[start - 1] == "(" else start
    return start


def _letters_are_context(scan: Scan, group: Group) -> bool:
    is_open = group.end >= len(scan.text) or not scan.text[group.end].isascii() or not scan.text[group.end].isalnum()
    return is_open and bool(re.search(r"(?<![a-z])(?:tel|phone|mobile|cell|fax|call)\Z", scan.before(group.start)))


def _national(scan: Scan, run: Run, groups: Sequence[Group], digits: str, context: bool) -> str | None:
    sizes = (layout(groups), tuple(group.num_digits for group in groups))
    is_bare = (len(digits),) in sizes
    if is_bare and not context and _NOT_A_PHONE.search(scan.before(groups[0].start)):
        return None
    if digits.startswith("00"):
        return _international(digits[2:]) if not is_bare or context or digits[2:4] == "86" else None
    if digits.startswith("86") and len(digits) == 13 and "CN" in scan.regions and digits[2] == "1":
        return _international(digits)
    for region in scan.regions:
        is_asked = region not in _KNOWN_LAYOUTS and len(groups) == len(run) and not is_bare
        if _is_likely(region, digits, sizes, context) or (is_asked and _is_as_printed(region, digits, sizes)):
            value = _valid(digits, region, is_length_enough=context and digits[0] == "0")
            if value is not None:
                return value
    return _local(scan, groups, digits, sizes[0]) if context else None


def _is_likely(region: str, digits: str, sizes: Sizes, context: bool) -> bool:
    """Whether digits written in groups of these sizes are worth the library's check; cheap."""
    if not 8 <= len(digits) <= 12:
        return False
    if region == "CN" and len(digits) == 11 and digits[0] == "1":
        return not _CHINESE_MOBILE.isdisjoint(sizes)
    if region == "CN" and len(digits) == 10 and digits[:3] in ("400", "800"):
        return context or not _CHINESE_HOTLINE.isdisjoint(sizes)
    if digits[0] == "0":  # a trunk prefix
        is_in_parts = (len(digits),) not in sizes and len(sizes[0]) <= 4 and sizes[0][0] >= 3
        return len(digits) >= 10 and (context or is_in_parts)
    return context or (region in ("US", "CA") and not _NORTH_AMERICAN.isdisjoint(sizes))


def _is_as_printed(region: str, digits: str, sizes: Sizes) -> bool:
    """Whether the library would put the spaces at the same places: slow, so only whole runs are asked about."""
    import phonenumbers

    if not 8 <= len(digits) <= 12:
        return False

    try:
        parsed = phonenumbers.parse(digits, region)
    except phonenumbers.NumberParseException:
        return False
    printed = phonenumbers.format_number(parsed, phonenumbers.PhoneNumberFormat.NATIONAL)
    return tuple(len(part) for part in re.findall("[0-9]+", printed)) in sizes


def _international(digits: str) -> str | None:
    return _valid(f"+{digits}", None)


def _valid(digits: str, region: str | None, is_length_enough: bool = False) -> str | None:
    """The number in its one international form where the plan of its country has it, or a number of its length."""
    import phonenumbers

    try:
        parsed = phonenumbers.parse(digits, region)
    except phonenumbers.NumberParseException:
        return None
    fits = phonenumbers.is_possible_number if is_length_enough else phonenumbers.is_valid_number
    if not fits(parsed):
        return None
    return str(phonenumbers.format_number(parsed, phonenumbers.PhoneNumberFormat.E164))


def _local(scan: Scan, groups: Sequence[Group], digits: str, sizes: tuple[int, ...]) -> str | None:
    """A number without its area code, which no plan can check: only right after a word for a telephone."""
    if sizes not in _LOCAL_LAYOUTS or any(group.gap not in (" ", "-") for group in groups[1:]):
        return None
    if (sizes == (4, 4) and digits[0] in "12") or re.fullmatch(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])[0-3]\d", digits):
        return None  # years, a date
    lead = scan.before(groups[0].start, 12)
    return digits if _CONTEXT.search(lead) else None
