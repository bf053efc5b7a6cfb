"""United States social security numbers: three, two and four digits. They have no check digit."""

import re
from collections.abc import Iterator, Sequence

from quantpipe.calibration.redaction.scan import Group, Run, Scan, Span

_CONTEXT = re.compile(r"\bssn|social[ _-]?security|\bss ?#|社会安全号|社会保障号|社安号")
_ISSUED = re.compile(r"(?!000|666|9)[0-9]{3}(?!00)[0-9]{2}(?!0000)[0-9]{4}")
_SIZES = ((9,), (3, 2, 4))


def find_us_ssns(scan: Scan) -> Iterator[Span]:
    """Numbers with two dashes; with spaces, or as nine digits, only after a word for them."""
    for run in scan.long_runs:
        for first in range(len(run)):
            for sizes in _SIZES:
                groups = run[first : first + len(sizes)]
                if tuple(group.num_digits for group in groups) == sizes and _is_ssn(scan, run, first, groups):
                    yield Span(groups[0].start, groups[-1].end, scan.digits(groups))


def _is_ssn(scan: Scan, run: Run, first: int, groups: Sequence[Group]) -> bool:
    start, end = groups[0].start, groups[-1].end
    after = run[first + len(groups)].gap if first + len(groups) < len(run) else ""
    if "-" in (groups[0].gap, after) or not scan.stands_alone(start, end):
        return False  # a longer number with dashes
    is_dashed = len(groups) == 3 and all(group.gap.strip() == "-" for group in groups[1:])
    if not is_dashed and not _CONTEXT.search(scan.before(start)):
        return False
    return bool(_ISSUED.fullmatch(scan.digits(groups)))
