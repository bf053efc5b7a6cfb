"""Which of a few given languages a text is written in. Knows no samples."""

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from quantpipe.errors import DataError

UNKNOWN = "und"
MAX_CHARS = 1000  # what is looked at: enough to tell, and the cost stays bounded
MIN_LETTERS = 12
IDEOGRAPH_LETTERS = 4  # a Chinese or Japanese character tells as much as this many letters


def detect(text: str, among: Sequence[str]) -> str:
    """The most likely language of ``text`` among those given, as it is written there (``zh-CN`` counts as ``zh``).

    Looks at the first 1,000 characters. ``und`` for text with fewer than 12 letters, where a Chinese character counts
    as four. A text in a language that is not given gets one of those that are: nothing is told apart that was not
    asked for. Raises DataError for a language that cannot be told, or if none is given.
    """
    start = text[:MAX_CHARS]
    identifier, given = _identifier(tuple(among))
    if sum(map(_letters, start)) < MIN_LETTERS:
        return UNKNOWN
    return given[str(identifier.classify(start)[0])]


def _letters(character: str) -> int:
    if not character.isalpha():
        return 0
    return IDEOGRAPH_LETTERS if unicodedata.east_asian_width(character) == "W" else 1


@lru_cache(maxsize=8)
def _identifier(among: tuple[str, ...]) -> tuple[Any, dict[str, str]]:
    """The model restricted to these languages, and the code that was given for each of its own."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # heavy: reads a model of 4 MB

    if not among:
        raise DataError("language: auto needs to know between which; list them under `languages`, such as [en, zh]")
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    given: dict[str, str] = {}
    for code in among:
        base = code.replace("_", "-").split("-")[0].lower()
        if base not in identifier.labels:
            raise DataError(
                f"language: auto cannot tell {code!r}; list codes such as en, de or zh, or name the source's language"
            )
        given.setdefault(base, code)
    identifier.set_languages(sorted(given))
    return identifier, given
