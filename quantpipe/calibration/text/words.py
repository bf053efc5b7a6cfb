"""Text reduced to what counts when two texts are compared: its words, in a form that typing habits do not change.

Knows neither samples nor files. Near duplicates, leakage and the hold-out all compare texts through this module, so
that they agree on which texts are the same.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

# First and last code points of scripts that put no spaces between words: each character counts as a word.
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration mark, closing mark, zero
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # ideographs, extension A
    (0x4E00, 0x9FFF),  # ideographs
    (0xF900, 0xFAFF),  # compatibility ideographs
    (0x20000, 0x3FFFF),  # further ideographs
)
_APOSTROPHES = "'\u2018\u2019\u02bc"
_VARIATION_SELECTORS = (0xFE00, 0xFE0F)
_LONGEST_CACHED = 32  # characters: a text without spaces must not fill the cache of words
_BASE = 0x9E3779B97F4A7C15  # odd, so that multiplying by it loses nothing modulo 2^64


class _Table(dict[int, str]):
    """A table for ``str.translate`` that is filled as characters are met."""

    def __init__(self, entry: Callable[[int], str]) -> None:
        self._entry = entry

    def __missing__(self, code: int) -> str:
        self[code] = entry = self._entry(code)
        return entry


def _visible(code: int) -> str:
    return "" if unicodedata.category(chr(code)) == "Cf" else chr(code)


def _spaced(code: int) -> str:
    """What a character becomes before the text is split at white space."""
    character, category = chr(code), unicodedata.category(chr(code))
    if character in _APOSTROPHES or _VARIATION_SELECTORS[0] <= code <= _VARIATION_SELECTORS[1]:
        return ""
    if category[0] == "S" or any(first <= code <= last for first, last in _UNSPACED):
        return f" {character} "
    return character if category[0] in "LMN" else " "


_VISIBLE = _Table(_visible)
_SPACED = _Table(_spaced)


def words(text: str) -> list[str]:
    """The words of ``text``: compatibility forms (NFKC) and case are folded, and punctuation only separates.

    Full-width letters equal the ordinary ones; apostrophes and invisible format characters vanish; symbols (+, =, €,
    emoji) are words of their own, as is each character of a script without spaces, such as Chinese.
    """
    return _folded(text).translate(_SPACED).split()


def normalised(text: str) -> str:
    """The words of ``text`` with single spaces between; of a text without words, what there is, folded likewise."""
    return " ".join(words(text)) or " ".join(_folded(text).split())


def text_digest(text: str) -> bytes:
    """16 bytes that are equal for texts that are the same after normalising."""
    return digest_of(normalised(text))


def digest_of(text: str) -> bytes:
    """16 bytes (BLAKE2b) of the text as it is; half a surrogate pair counts as itself."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def ngram_hashes(of: Sequence[str], size: int) -> Hashes:
    """The distinct runs of ``size`` words, as sorted 64-bit hashes; empty where there are fewer words.

    The same in every process. Two different runs have the same hash with a chance of about 2^-64.
    """
    if len(of) < size:
        return np.zeros(0, dtype=np.uint64)
    hash_of = _cached_hash if max(map(len, of)) <= _LONGEST_CACHED else _word_hash
    each = np.fromiter(map(hash_of, of), dtype=np.uint64, count=len(of))
    return np.unique(np.correlate(each, _powers(size), mode="valid"))  # sums of hash times power, modulo 2^64


@lru_cache(maxsize=8)
def _powers(size: int) -> Hashes:
    """The powers of the base, highest first."""
    return np.array([pow(_BASE, exponent, 1 << 64) for exponent in reversed(range(size))], dtype=np.uint64)


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower()
    visible = unicodedata.normalize("NFKC", text.translate(_VISIBLE))
    return unicodedata.normalize("NFKC", visible.casefold())


def _word_hash(word: str) -> int:
    return _cached_hash(word) if len(word) <= _LONGEST_CACHED else _hash(word)


@lru_cache(maxsize=1 << 16)
def _cached_hash(word: str) -> int:
    return _hash(word)


def _hash(word: str) -> int:
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
