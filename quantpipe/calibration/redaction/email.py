"""E-mail addresses: around every at sign, also written ``%40`` or ``[at]``, with Chinese domain names.

Looks 64 characters back and 255 ahead of a sign, so a text costs what its signs cost.
"""

import re
from collections.abc import Iterator

from quantpipe.calibration.redaction.scan import Scan, Span

_WRITTEN_AT = re.compile(r"[ ]?[\[(][ ]?(?:at|AT|At)[ ]?[\])][ ]?")
_WRITTEN_DOT = re.compile(r"[ ]?[\[(][ ]?dot[ ]?[\])][ ]?")
_LOCAL = re.compile(r"(?:\"[^\"\n]{1,62}\"|[A-Za-z0-9\u00c0-\u024f!#$%&'*+/=?^_`{|}~.-]{1,64})\Z")
_CHINESE_LOCAL = re.compile(r"[\u4e00-\u9fff]{1,4}[A-Za-z0-9._-]{0,20}\Z")
_DOT = r"(?:\.|[ ]?[\[(][ ]?(?:dot|DOT|Dot)[ ]?[\])][ ]?)"
_LABEL = r"[A-Za-z0-9\u00c0-\u024f](?:[A-Za-z0-9\u00c0-\u024f-]{0,61}[A-Za-z0-9\u00c0-\u024f])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}{_DOT}){{1,8}}(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z]{{2,24}})(?![A-Za-z0-9_])")
_CHINESE_NAMES = (
    "中国|中國|公司|网络|網絡|香港|台湾|台灣|澳门|网址|在线|中文网|商城|集团|网店|商店|政务|公益|我爱你|"
    "移动|信息|机构|世界"
)
_CHINESE_DOMAIN = re.compile(
    rf"(?:[\u4e00-\u9fffA-Za-z0-9-]{{1,30}}\.){{1,4}}(?:{_CHINESE_NAMES}|[A-Za-z]{{2,24}}(?![A-Za-z0-9_]))"
)
_FILE_NAMES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".css", ".html", ".json", ".pdf")  # logo@2x.png
_NEVER_METHODS = (
    ".com",
    ".cn",
    ".net",
    ".org",
    ".edu",
    ".gov",
    ".hk",
    ".tw",
    ".jp",
    ".de",
    ".fr",
    ".uk",
    ".io",
    ".info",
)
_LOCAL_SIGNS = "!#$%&'*+/=?^`{|}~.-"


def find_emails(scan: Scan) -> Iterator[Span]:
    """Addresses with a local part and a domain of at least two names."""
    text = scan.text
    for at, after in _at_signs(scan):
        local = _local_part(text, at)
        domain = _DOMAIN.match(text, after) or _CHINESE_DOMAIN.match(text, after)
        if local is None or domain is None or _is_something_else(text, local, at, domain.end()):
            continue
        name = _WRITTEN_DOT.sub(".", domain.group().lower())
        yield Span(local, domain.end(), f"{text[local:at].lower()}@{name}")


def _at_signs(scan: Scan) -> Iterator[tuple[int, int]]:
    """Where each at sign begins and ends, however it is written."""
    for sign in ("@", "%40"):
        if sign[0] in scan.text:
            yield from ((at, at + len(sign)) for at in scan.places(sign, scan.text))
    for bracket in "])":
        for place in scan.places(bracket, scan.text):
            if scan.text[place - 2 : place] in ("at", "AT", "At", "t ", "T "):
                match = _WRITTEN_AT.search(scan.text, max(0, place - 5), place + 2)
                if match:
                    yield match.span()


def _local_part(text: str, end: int) -> int | None:
    """Where the local part that ends at ``end`` begins."""
    start = max(0, end - 64)
    found = _LOCAL.search(text, start, end) or _CHINESE_LOCAL.search(text, start, end)
    if found is None:
        return None
    begin = found.start()
    if text[begin] != '"':
        query = max(text.rfind(sign, begin, end) for sign in "=/?&|{")  # email=a@b.cn, paths
        begin = max(begin, query + 1)
        while begin < end and text[begin] in _LOCAL_SIGNS:
            begin += 1
    return begin if begin < end else None


def _is_something_else(text: str, start: int, sign: int, end: int) -> bool:
    """Whether it is a password of a URL, a path of git over ssh, a file's name or the call of a method."""
    lead = text[max(0, start - 64) : start]
    if lead.endswith(":") and re.search(r"(?://|sip:)[^\s/]{0,60}:\Z", lead):
        return True  # https://user:password@host
    if text[start:sign] == "git" and text[end : end + 1] in (":", "/"):
        return True  # git@github.com:owner/name
    address = text[start:end].lower()
    return address.endswith(_FILE_NAMES) or (text[end : end + 1] == "(" and not address.endswith(_NEVER_METHODS))
