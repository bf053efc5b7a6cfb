"""Addresses of computers: IPv4, and IPv6 with its zone id. Not those that name nobody: loopback, masks, ``::``.

Four numbers with dots can be a version: they are an address unless a word for a version or a section stands before
them, or they go on like the name of a file.
"""

import ipaddress
import re
from collections.abc import Iterator

from quantpipe.calibration.redaction.scan import WORD, Scan, Span

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_V4 = re.compile(rf"(?:{_OCTET}\.){{3}}{_OCTET}(?![A-Za-z0-9_]|\.[0-9A-Za-z]|-[A-Za-z])")
_V6 = re.compile(r"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,8}(?:(?:\.[0-9]{1,3}){3})?(?:%[A-Za-z0-9._-]{1,24})?")
_HEX = frozenset("0123456789abcdefABCDEF")
_VERSION = re.compile(
    r"(?:\bv|\bver\.?|versions?|release|build|firmware|driver|kernel|\bec|\brev(?:ision)?\.?|updated? to|upgraded? to|"
    r"section|\bsec\.|chapter|clause|article|paragraph|step|figure|\bfig\.|table|appendix|item|rule|"
    r"版本号?|固件|升级[到至]|更新[到至]|驱动|[章节条款第表图]|附录|[=~^<>]=|[~^§]|\b[a-z][a-z0-9]*[-_])"
    r"[ \t]*(?:no\.?|号|is|was|are|为|是|到|:|=)?[ \t:\"']*\Z"
)
_BETWEEN_VERSIONS = re.compile(r"[ ]?(?:,|/|-|->|and|or|to|、|和|或|到|至)[ ]?")


def find_ips(scan: Scan) -> Iterator[Span]:
    """IPv4 and IPv6 addresses; a port or the length of a prefix stays."""
    if scan.text.count(".") >= 3:
        yield from _find_v4(scan)
    if scan.text.count(":") >= 2:
        yield from _find_v6(scan)


def _find_v4(scan: Scan) -> Iterator[Span]:
    version_end = None
    for start in _quads(scan):
        match = _V4.match(scan.text, start)
        if match is None:
            continue
        end = match.end()
        goes_on = version_end is not None and start - version_end <= 8
        goes_on = goes_on and bool(_BETWEEN_VERSIONS.fullmatch(scan.lower, version_end or 0, start))
        if goes_on or _VERSION.search(scan.before(start)):
            version_end = end
        elif not _says_nothing(match.group()):
            yield Span(start, end, match.group())


def _quads(scan: Scan) -> Iterator[int]:
    """Where four groups of digits with dots between them begin, and neither a dot nor a letter but v goes before."""
    for run in scan.runs:
        for first in range(len(run) - 3):
            start = run[first].start
            lead = scan.text[max(0, start - 2) : start]
            is_first = not lead or not (lead[-1] in WORD or lead[-1] == ".") or lead in ("v", "V", " v", " V")
            if is_first and all(group.gap == "." for group in run[first + 1 : first + 4]):
                yield start


def _says_nothing(address: str) -> bool:
    parsed = ipaddress.IPv4Address(address)
    bits = int(parsed)
    is_mask = bits >> 24 == 255 and (~bits & 0xFFFFFFFF) & ((~bits & 0xFFFFFFFF) + 1) == 0
    return parsed.is_loopback or parsed.is_unspecified or is_mask


def _find_v6(scan: Scan) -> Iterator[Span]:
    done = 0
    for colon in scan.places(":", scan.text):
        if colon < done:
            continue
        start = colon
        while start > max(done, colon - 4) and scan.text[start - 1] in _HEX:
            start -= 1
        match = _V6.match(scan.text, start)
        if match is None:
            continue
        done = match.end()
        written = match.group().rstrip("._-")
        end = start + len(written)
        value = _v6_value(written)
        if value is not None and scan.stands_alone(start, end) and scan.text[end : end + 1] != ":":
            yield Span(start, end, value)


def _v6_value(written: str) -> str | None:
    """The address in its one short form; None for what is no address, or as likely an operator of a language."""
    address, _, zone = written.partition("%")
    groups = [group for group in address.split(":") if group]
    if len(groups) < 2 or not any(char.isdigit() for char in address) or sum(map(len, groups)) < 5:
        return None
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return None
    return f"{parsed.compressed}%{zone}" if zone else parsed.compressed
