"""Keys, tokens and passwords: well-known prefixes, private keys in PEM, and values assigned to a name for a secret."""

import re
from collections.abc import Iterator

from quantpipe.calibration.redaction.entropy import is_placeholder, looks_random
from quantpipe.calibration.redaction.scan import Scan, Span

# What every such key holds (looked for first: cheap), and its whole form. The class that repeats is excluded before the
# start, so that no text is read twice.
_KNOWN: tuple[tuple[str, "re.Pattern[str]"], ...] = tuple(
    (needle, re.compile(pattern))
    for needle, pattern in (
        ("AKIA", r"(?<![A-Za-z0-9])AKIA[A-Z0-9]{16}(?![A-Za-z0-9])"),  # AWS
        ("ASIA", r"(?<![A-Za-z0-9])ASIA[A-Z0-9]{16}(?![A-Za-z0-9])"),
        ("gh", r"(?<![A-Za-z0-9_])gh[pousr]_[A-Za-z0-9]{30,}"),  # GitHub
        ("github_pat_", r"(?<![A-Za-z0-9_])github_pat_[A-Za-z0-9_]{22,}"),
        ("glpat-", r"(?<![\w-])glpat-[\w-]{20,}"),  # GitLab
        ("xox", r"(?<![A-Za-z0-9-])xox[abeoprs]-[A-Za-z0-9-]{10,}"),  # Slack
        ("hooks.slack.com/services/", r"(?<=hooks\.slack\.com/services/)[A-Za-z0-9/]{20,}"),
        ("AIza", r"(?<![\w-])AIza[\w-]{35}(?![\w-])"),  # Google
        ("GOCSPX-", r"(?<![\w-])GOCSPX-[\w-]{20,}"),
        ("ya29.", r"(?<![\w.-])ya29\.[\w.-]{20,}"),
        ("k_live_", r"(?<![A-Za-z0-9_])[srp]k_live_[A-Za-z0-9]{16,}"),  # Stripe
        ("k_test_", r"(?<![A-Za-z0-9_])[srp]k_test_[A-Za-z0-9]{16,}"),
        ("whsec_", r"(?<![A-Za-z0-9_])whsec_[A-Za-z0-9+/]{16,}"),
        ("hf_", r"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{30,}"),  # Hugging Face
        ("npm_", r"(?<![A-Za-z0-9_])npm_[A-Za-z0-9]{36}"),
        ("pypi-", r"(?<![\w-])pypi-[\w-]{40,}"),
        ("SG.", r"(?<![\w.-])SG\.[\w-]{16,}\.[\w-]{16,}"),  # SendGrid
        ("LTAI", r"(?<![A-Za-z0-9])LTAI[A-Za-z0-9]{12,26}(?![A-Za-z0-9])"),  # Alibaba Cloud
        ("AKID", r"(?<![A-Za-z0-9])AKID[A-Za-z0-9]{16,36}(?![A-Za-z0-9])"),  # Tencent Cloud
        ("dop_v1_", r"(?<![A-Za-z0-9_])dop_v1_[0-9a-f]{64}"),  # DigitalOcean
        (":AA", r"(?<![A-Za-z0-9_])[0-9]{8,10}:AA[\w-]{33}(?![\w-])"),  # Telegram
        ("eyJ", r"(?<![\w.-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]*)?"),  # JSON Web Token
    )
)
_OPENAI = re.compile(r"(?<![\w-])sk-[\w-]{20,}")  # also Anthropic, DeepSeek and others
_PEM = re.compile(r"-----(BEGIN|END) [A-Z0-9 ]{0,24}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s:,-]|\\[rn])*")
_STRONG = (
    r"api[_-]?key|api[_-]?token|secret|token|access[_-]?key|private[_-]?key|account[_-]?key|credentials?|"
    r"密钥|秘钥|令牌|授权码"
)
_PASSWORDS = r"password|passwd|passphrase|passcode|pwd|(?<![A-Za-z])pw|密码|密碼|口令"
_ASSIGNED = re.compile(
    rf"""(?:({_PASSWORDS})|{_STRONG}|(?<![A-Za-z_-])key)
    (?:s|[_-][A-Za-z0-9_-]{{0,24}})? [\"'\\]{{0,2}} (?:(?![A-Za-z0-9_])|(?<=[码碼令钥]))      # the name and its quotes
    [ \t]{{0,3}}
    (?:=>|:=|==|=|:|是|为|改[成为]|重置为|换成|设[为成]|is(?![A-Za-z])|(?:changed|reset|set)[ ]to(?![A-Za-z])
        |(?<=[码碼令钥])|([ ](?=[!-~]{{0,20}}[!@#$%^&*])))                                  # what says: it is this
    [ \t]{{0,3}} (?:Bearer[ ]|Basic[ ])? [\"'`\\]{{0,2}}
    ((?:[!#$%*+./0-9:=?@A-Z\[\]^_a-z{{|}}~-]|&(?![A-Za-z_]{{1,24}}=)){{6,}})               # the value
    """,
    re.IGNORECASE | re.VERBOSE,
)
_AUTHORIZATION = re.compile(r"(?<![A-Za-z])(?:Bearer|Basic)[ ]+([A-Za-z0-9._~+/=-]{16,})", re.IGNORECASE)
_WORDS = (
    "key",
    "secret",
    "token",
    "pass",
    "pw",
    "credential",
    "密码",
    "密碼",
    "口令",
    "密钥",
    "秘钥",
    "令牌",
    "授权码",
)


def find_api_keys(scan: Scan) -> Iterator[Span]:
    """Secrets by their form, or by the name they are assigned to and their look."""
    text = scan.text
    for needle, pattern in _KNOWN:
        if needle in text:
            yield from (Span(match.start(), match.end(), match.group()) for match in pattern.finditer(text))
    if "sk-" in text:
        for match in _OPENAI.finditer(text):
            if _is_openai_like(match.group()[3:]):
                yield Span(match.start(), match.end(), match.group())
    if "PRIVATE KEY" in text:
        yield from _private_keys(text)
    yield from _assigned(scan)


def _is_openai_like(word: str) -> bool:
    """Random, and not a CSS class such as ``sk-estimator-doc-link``."""
    return (looks_random(word, min_chars=20) and not word.islower()) or bool(re.fullmatch(r"[0-9a-f]{32,64}", word))


def _private_keys(text: str) -> Iterator[Span]:
    """From BEGIN to END; without an END to where the encoded lines stop."""
    begin: re.Match[str] | None = None
    for mark in _PEM.finditer(text):
        if begin is not None and mark.group(1) == "END":
            yield Span(begin.start(), mark.end(), text[begin.end() : mark.start()])
            begin = None
        elif mark.group(1) == "BEGIN":
            if begin is not None:
                yield _unfinished(text, begin, mark.start())
            begin = mark
    if begin is not None:
        yield _unfinished(text, begin, len(text))


def _unfinished(text: str, begin: "re.Match[str]", limit: int) -> Span:
    body = _PEM_BODY.match(text, begin.end(), limit)
    end = body.end() if body else begin.end()
    return Span(begin.start(), end, text[begin.end() : end])


def _assigned(scan: Scan) -> Iterator[Span]:
    if not any(word in scan.lower for word in _WORDS) and "earer " not in scan.lower and "asic " not in scan.lower:
        return
    for match in _ASSIGNED.finditer(scan.text):
        name, bare, value = match.groups()
        value = value.rstrip(".:?]}")
        if _is_call(scan.text, match.end(3)) or (bare and not name):
            continue
        is_secret = _looks_like_a_password(value, 3 if bare else 2) if name else looks_random(value)
        if is_secret:
            yield Span(match.start(3), match.start(3) + len(value), value)
    for match in _AUTHORIZATION.finditer(scan.text):
        if looks_random(match.group(1)):
            yield Span(match.start(1), match.end(1), match.group(1))


def _is_call(text: str, end: int) -> bool:
    """Whether what ends at ``end`` is called: ``token = get_token1(x)`` holds no token."""
    return text[end : end + 1] == "(" and text[end + 1 : end + 2].isascii()


def _looks_like_a_password(value: str, fewest_kinds: int) -> bool:
    """Six characters of several kinds, or six digits; words alone are what people write about passwords."""
    if len(value) < 6 or not value.isascii() or is_placeholder(value):
        return False
    kinds = (any(map(str.isdigit, value)), any(map(str.isalpha, value)), any(char in "!@#$%^&*~?+" for char in value))
    return sum(kinds) >= fewest_kinds or (value.isdigit() and fewest_kinds < 3)
