"""Chinese identity numbers (GB 11643): 17 digits and a check sign, or 15 digits of the old form after a word for it."""

import datetime
import re
from collections.abc import Iterator, Sequence

from quantpipe.calibration.redaction.scan import Group, Run, Scan, Span, windows

_PROVINCES = re.compile("1[1-5]|2[1-3]|3[1-7]|4[1-6]|5[0-4]|6[1-5]|71|8[1-3]|91")
_CHECK_X = re.compile(r"[ \-]?[Xx](?![0-9A-Za-z_])")
_CONTEXT = re.compile(r"身份证|身份證|证件号|證件號|公民身份|\bid card|\bidentity|\bresident id")


def find_cn_id_cards(scan: Scan) -> Iterator[Span]:
    """Numbers with a known province, a real date of birth and the right check sign."""
    for run in scan.long_runs:
        first = 0
        while first < len(run):
            found = _card_at(scan, run, first)
            if found is None:
                first += 1
                continue
            groups, end, value = found
            yield Span(groups[0].start, end, value)
            first += len(groups)


def _card_at(scan: Scan, run: Run, first: int) -> tuple[Sequence[Group], int, str] | None:
    for groups in windows(run, first, 15, 18):
        digits = scan.digits(groups)
        end = groups[-1].end
        if len(digits) == 17 and (sign := _CHECK_X.match(scan.text, end)):
            digits, end = f"{digits}X", sign.end()
        if not scan.stops_at(end) or not _PROVINCES.match(digits):
            continue
        if len(digits) == 18 and _is_date(digits[6:14]) and _check_sign_fits(digits):
            return groups, end, digits
        if len(digits) == 15 and _is_date(f"19{digits[6:12]}") and _CONTEXT.search(scan.before(groups[0].start)):
            return groups, end, digits
    return None


def _check_sign_fits(digits: str) -> bool:
    from stdnum.iso7064 import mod_11_2

    return bool(mod_11_2.is_valid(digits))


def _is_date(digits: str) -> bool:
    try:
        year = datetime.date(int(digits[:4]), int(digits[4:6]), int(digits[6:])).year
    except ValueError:
        return False
    return 1880 <= year <= 2100
