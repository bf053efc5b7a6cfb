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
_FEWEST_KEY_CHARS = 15
_OPENAI = re.compile(r"(?<![\w-])sk-[\w-]{20,}")  # also Anthropic, DeepSeek and others
_PEM = re.compile(r"-----(BEGIN|END) [A-Z0-9 ]{0,24}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s:,-]|\\[rn])*")
# Words that a value may be assigned to, and the look it must have. "key" alone is part of too many names.
_STRONG = ("secret", "token", "credential", "密钥", "秘钥", "令牌", "授权码", "key")
_PASSWORDS = ("pass", "pw", "密码", "密碼", "口令")
_NAMES = (*_PASSWORDS, *_STRONG)
_BEFORE_KEY = re.compile(r"(?:(?<![a-z_-])|api[_-]?|access[_-]?|private[_-]?|account[_-]?|secret[_-]?|signing[_-]?)\Z")
_LETTERS_AFTER = re.compile(r"s?[a-rt-z]")
_LETTER_BEFORE = re.compile(r"[a-z]\Z")
_ASSIGNED = re.compile(
    r"""(?:s|word|wd|phrase|code|d)?s? (?:[_-][A-Za-z0-9_-]{0,24})? [\"'\\]{0,2} (?:(?![A-Za-z0-9_])|(?<=[码碼令钥]))
    # Above: how the name goes on, and its quotes. Below: the sign or word that assigns, then the value.
    [ \t]{0,3}
    (?:=>|:=|==|=|:|是|为|改[成为]|重置为|换成|设[为成]|is(?![A-Za-z])|(?:changed|reset|set)[ ]to(?![A-Za-z])
        |(?<=[码碼令钥])|(?P<bare>[ ](?=[!-~]{0,20}[!@\#$%^&*])))
    [ \t]{0,3} (?:Bearer[ ]|Basic[ ])? [\"'`\\]{0,2}
    (?P<value>(?:[!\#$%*+./0-9:=?@A-Z\[\]^_a-z{|}~-]|&(?![A-Za-z_]{1,24}=)){6,128})
    """,
    re.IGNORECASE | re.VERBOSE,
)
_AFTER = ".:?]}"
_MOST_CHARS = 128  # of a value that are looked at, so that names within values cost little
_GOES_ON = re.compile(r"[A-Za-z0-9._~+/=-]*")
_AUTHORIZATION = re.compile(r"[ ]{1,3}([A-Za-z0-9._~+/-]{16,128}={0,2})")


def find_api_keys(scan: Scan) -> Iterator[Span]:
    """Secrets by their form, or by the name they are assigned to and their look."""
    text = scan.text
    long_words = " ".join(word for word in text.split() if len(word) >= _FEWEST_KEY_CHARS)  # of prose hardly any
    for needle, pattern in _KNOWN if long_words else ():
        if needle in long_words:
            yield from (Span(match.start(), match.end(), match.group()) for match in pattern.finditer(text))
    if "sk-" in long_words:
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
    lower = scan.lower
    for word in _NAMES:
        done = 0
        for place in scan.places(word, lower) if word in lower else ():
            match = _ASSIGNED.match(scan.text, place + len(word)) if place >= done else None
            if match and _is_name(lower, word, place) and _is_secret(scan.text, match, word in _PASSWORDS):
                span = _whole_value(scan.text, match.start("value"), match.end("value"))
                done = span.end
                yield span
    for word in ("bearer", "basic"):
        for place in scan.places(word, lower) if word in lower else ():
            match = _AUTHORIZATION.match(scan.text, place + len(word))
            if match and looks_random(match.group(1)):
                yield _whole_value(scan.text, match.start(1), match.end(1))


def _is_secret(text: str, match: "re.Match[str]", is_password: bool) -> bool:
    value, is_bare = match.group("value").rstrip(_AFTER), match.group("bare") is not None
    if _is_call(text, match.end()):
        return False
    return _looks_like_a_password(value, 3 if is_bare else 2) if is_password else looks_random(value) and not is_bare


def _whole_value(text: str, start: int, end: int) -> Span:
    """The value without the sign that ends a sentence; or with what goes on after its most characters."""
    rest = _GOES_ON.match(text, end) if end - start == _MOST_CHARS else None
    value = text[start : rest.end()] if rest else text[start:end].rstrip(_AFTER)
    return Span(start, start + len(value), value)


def _is_name(lower: str, word: str, place: int) -> bool:
    """Whether the word is a name of its own or the end of one: not ``monkey``, ``keyword``, ``mpw``."""
    end = place + len(word)
    if word == "key":
        return not _LETTERS_AFTER.match(lower, end) and bool(_BEFORE_KEY.search(lower, max(0, place - 10), place))
    return word != "pw" or lower.startswith("d", end) or not _LETTER_BEFORE.search(lower, max(0, place - 1), place)


def _is_call(text: str, end: int) -> bool:
    """Whether what ends at ``end`` is called: ``token = get_token1(x)`` holds no token."""
    return text[end : end + 1] == "(" and text[end + 1 : end + 2].isascii()


def _looks_like_a_password(value: str, fewest_kinds: int) -> bool:
    """Six characters of several kinds, or six digits; words alone are what people write about passwords."""
    if len(value) < 6 or not value.isascii() or is_placeholder(value):
        return False
    kinds = (any(map(str.isdigit, value)), any(map(str.isalpha, value)), any(char in "!@#$%^&*~?+" for char in value))
    return sum(kinds) >= fewest_kinds or (value.isdigit() and fewest_kinds < 3)
