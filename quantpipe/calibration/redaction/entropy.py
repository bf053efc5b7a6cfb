"""Whether a word looks drawn at random: what tells a key from a name."""

import math
import re
from collections import Counter
from itertools import pairwise

_PLACEHOLDERS = (
    "your",
    "example",
    "xxxx",
    "changeme",
    "<",
    "{",
    "$",
    "%",
    "[",
    "****",
    "os.",
    "env.",
    "process.",
    "http",
    "none",
    "null",
)
_HEX = frozenset("0123456789abcdefABCDEF-")


def bits_per_char(word: str) -> float:
    """Shannon entropy of the word's own characters."""
    return -sum(n / len(word) * math.log2(n / len(word)) for n in Counter(word).values())


def is_placeholder(word: str) -> bool:
    """Whether the word stands for a value that somebody is to fill in, or for code that fetches it."""
    return word.lower().startswith(_PLACEHOLDERS) or "(" in word or len(set(word)) < 3


def looks_random(word: str, min_chars: int = 16) -> bool:
    """Letters and digits mixed, few repeated: tokens and keys, and hashes as well, but not words, paths or dates."""
    if len(word) < min_chars or is_placeholder(word) or _is_words(word):
        return False
    num_digits = sum(char.isdigit() for char in word)
    num_letters = sum(char.isalpha() for char in word)
    if not num_letters or num_digits < 2:
        return num_letters >= min_chars and _is_mixed_case(word) and bits_per_char(word) >= 4.0
    least_bits = 2.8 if _HEX.issuperset(word) else 3.3
    return bits_per_char(word) >= least_bits


def _is_words(word: str) -> bool:
    """Whether it is made of words and short numbers between signs: ``projects/12/name``, ``build-linux-64``."""
    parts = [part for part in re.split(r"[^A-Za-z0-9]+", word) if part]
    return len(parts) > 1 and all(re.fullmatch(r"[A-Za-z]?[a-z]*|[A-Z]+|[0-9]{1,6}", part) for part in parts)


def _is_mixed_case(word: str) -> bool:
    """Whether capitals follow small letters more often than in names such as ``getUserName``."""
    changes = sum(a.islower() and b.isupper() for a, b in pairwise(word))
    return changes * 7 >= len(word)
