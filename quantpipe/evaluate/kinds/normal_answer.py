"""What may be disregarded when answers are compared: case, punctuation, articles, width of characters."""

import re
import string
import unicodedata
from typing import Annotated, Literal, get_args

from pydantic import Field

Disregard = Literal["case", "punctuation", "articles", "unicode"]
Disregards = Annotated[tuple[Disregard, ...], Field(strict=False)]
DISREGARDS: tuple[Disregard, ...] = get_args(Disregard)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)


def normal_answer(text: str, disregard: tuple[Disregard, ...]) -> str:
    """``text`` without what is disregarded; white space never counts, but for one space between words."""
    if "unicode" in disregard:
        text = unicodedata.normalize("NFKC", text)
    if "case" in disregard:
        text = text.casefold()
    if "punctuation" in disregard:
        text = "".join(" " if _is_mark(each) else each for each in text)
    if "articles" in disregard:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split())


def _is_mark(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")
