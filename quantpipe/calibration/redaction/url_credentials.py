"""What lets one in, in an address: ``user:password@``, and parameters such as ``token=``. The address itself stays."""

import re
from collections.abc import Iterator

from quantpipe.calibration.redaction.entropy import is_placeholder, looks_random
from quantpipe.calibration.redaction.scan import Scan, Span

_USER = re.compile(
    r"(?://|sip:)([^\s/?#@:\"'<>]{0,128}:[^\s/?#\"'<>@]{1,256}(?:@[^\s/?#\"'<>@.]{1,64}){0,2})@(?=[A-Za-z0-9\[])"
)
_NAMES = (
    "access_token|refresh_token|id_token|auth_token|session_token|token|api[_-]?key|app[_-]?key|access[_-]?key|client_secret|app_?secret|"
    "secret|password|passwd|pwd|pass|signature|sig|sign|jwt|session_?id|sid|ticket|x-amz-signature|x-amz-credential|"
    "x-amz-security-token|x-goog-signature|ossaccesskeyid|auth|code|key"
)
_PARAMETER = re.compile(rf"[?&#;](?:amp;)?({_NAMES})=([!$%*+,./0-9:;=?@A-Z\[\]^_a-z{{|}}~-]+)", re.IGNORECASE)
_OPENS_A_PLACEHOLDER = "<{$[*"
_WEAK_NAMES = frozenset({"key", "code", "auth", "sid", "sign", "ticket", "pass"})


def find_url_credentials(scan: Scan) -> Iterator[Span]:
    """User and password before a host, and the values of parameters that are named like a secret."""
    text = scan.text
    if "//" in text or "sip:" in text:
        for match in _USER.finditer(text):
            password = match.group(1).partition(":")[2]
            if password[0] not in _OPENS_A_PLACEHOLDER:
                yield Span(match.start(1), match.end(1), match.group(1))
    if "=" in text and ("?" in text or "&" in text or "#" in text):
        for match in _PARAMETER.finditer(text):
            name, value = match.group(1).lower(), match.group(2)
            trimmed = value.rstrip(".,;:!?")
            if _is_secret(name, trimmed):
                yield Span(match.start(2), match.start(2) + len(trimmed), trimmed)


def _is_secret(name: str, value: str) -> bool:
    if is_placeholder(value):
        return False
    if name in _WEAK_NAMES:
        return looks_random(value)
    if name in ("password", "passwd", "pwd"):
        return len(value) >= 4
    return len(value) >= 6 and any(char.isdigit() for char in value)
