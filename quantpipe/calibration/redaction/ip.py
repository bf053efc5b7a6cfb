"""Addresses of computers: IPv4, and IPv6 with its zone id. Not those that name nobody: loopback, masks, ``::``.

Four numbers with dots can be a version: they are an address unless a word for a version or a section stands before
them, or they go on like the name of a file.
"""

import ipaddress
import re
from collections.abc import Iterator

from quantpipe.calibration.redaction.scan import Scan, Span

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_V4 = re.compile(rf"(?<![A-Za-z0-9_.])([vV]?)(?:{_OCTET}\.){{3}}{_OCTET}(?![A-Za-z0-9_]|\.[0-9A-Za-z]|-[A-Za-z])")
_V6 = re.compile(
    r"(?<![A-Za-z0-9_:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,8}(?:(?:\.[0-9]{1,3}){3})?(?:%[A-Za-z0-9._-]{1,24})?"
)
_VERSION = re.compile(
    r"(?:\bv|\bver\.?|versions?|release|build|firmware|driver|kernel|\brev(?:ision)?\.?|updated? to|upgraded? to|"
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
    for match in _V4.finditer(scan.text):
        start, end = match.span()
        goes_on = version_end is not None and start - version_end <= 8
        goes_on = goes_on and bool(_BETWEEN_VERSIONS.fullmatch(scan.lower, version_end or 0, start))
        if match.group(1) or goes_on or _VERSION.search(scan.before(start)):
            version_end = end
        elif not _says_nothing(match.group()):
            yield Span(start, end, match.group())


def _says_nothing(address: str) -> bool:
    parsed = ipaddress.IPv4Address(address)
    bits = int(parsed)
    is_mask = bits >> 24 == 255 and (~bits & 0xFFFFFFFF) & ((~bits & 0xFFFFFFFF) + 1) == 0
    return parsed.is_loopback or parsed.is_unspecified or is_mask


def _find_v6(scan: Scan) -> Iterator[Span]:
    for match in _V6.finditer(scan.text):
        written = match.group().rstrip("._-")
        address, _, zone = written.partition("%")
        end = match.start() + len(written)
        if not scan.stands_alone(match.start(), end) or scan.text[end : end + 1] == ":":
            continue
        groups = [group for group in address.split(":") if group]
        if len(groups) < 2 or not any(char.isdigit() for char in address) or sum(map(len, groups)) < 5:
            continue
        try:
            parsed = ipaddress.IPv6Address(address)
        except ValueError:
            continue
        yield Span(match.start(), end, f"{parsed.compressed}%{zone}" if zone else parsed.compressed)
