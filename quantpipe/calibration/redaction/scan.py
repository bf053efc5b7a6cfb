"""A text as the rules look at it: signs folded to ASCII with offsets back to the original, and its groups of digits.

Full-width and other digits, spaces, dashes and quotes become their ASCII sign; characters that show nothing (zero-width
spaces, soft hyphens) are left out. Every rule is linear: it looks a bounded number of times at each sign.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple


class Span(NamedTuple):
    """Characters [start, end) that a rule found; equal values (however written) get equal placeholders."""

    start: int
    end: int
    value: str


class Group(NamedTuple):
    """Digits in a row, [start, end), and what stands between them and the group before."""

    start: int
    end: int
    gap: str

    @property
    def num_digits(self) -> int:
        return self.end - self.start


# Groups with at most a few spaces, dashes, dots, slashes, brackets or one line break between them.
Run = Sequence[Group]

_INVISIBLE = (
    "\u00ad\u180e\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060"
    "\u2066\u2067\u2068\u2069\ufe0f\ufeff\u20e3"
)
_SPACES = "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2043\u2212\ufe58\ufe63"


def _ascii_signs() -> dict[str, str]:
    signs = {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    signs |= dict.fromkeys(_SPACES, " ") | dict.fromkeys(_DASHES, "-") | dict.fromkeys("\u2028\u2029\x85", "\n")
    signs |= {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\ufe6b": "@"}
    signs |= dict.fromkeys("\u00b7\u2022\u30fb", ".")  # dots in the middle of a line, between groups of digits
    digits = ((chr(code), unicodedata.decimal(chr(code), None)) for code in range(0x80, sys.maxunicode + 1))
    return signs | {char: str(digit) for char, digit in digits if digit is not None}


_SIGNS = _ascii_signs()
_DIGITS = re.compile(r"[0-9][0-9]*")  # not [0-9]+: the first sign as a class lets the search skip faster
_GAP = re.compile(r"[ \t.\-/()]{1,4}|[ \t\-]{0,3}\r?\n[ \t>]{0,8}")
WORD = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
CONTEXT_CHARS = 28
FEWEST_DIGITS = 7
MOST_GROUPS = 7


class Scan:
    """What all rules share about one text. ``text`` is folded; ``locate`` gives a span its offsets in the original."""

    def __init__(self, original: str, regions: Sequence[str] = ()) -> None:
        self.text = original
        self.regions = regions
        self._offsets: list[int] | None = None
        if not original.isascii():
            self._fold(set(original))

    def _fold(self, chars: set[str]) -> None:
        for char in chars:
            if char in _SIGNS:
                self.text = self.text.replace(char, _SIGNS[char])
        if not chars.isdisjoint(_INVISIBLE):
            self._offsets = [i for i, char in enumerate(self.text) if char not in _INVISIBLE]
            self.text = "".join(self.text[i] for i in self._offsets)

    @cached_property
    def lower(self) -> str:
        """The text in lower case, of the same length as ``text``."""
        lower = self.text.lower()
        return (
            lower
            if len(lower) == len(self.text)
            else "".join(c if len(c.lower()) > 1 else c.lower() for c in self.text)
        )

    @cached_property
    def runs(self) -> Sequence[Run]:
        """All groups of digits; those that may be parts of one number are in one run."""
        if not any(digit in self.text for digit in "0123456789"):  # ten fast searches instead of a slow one
            return ()
        runs: list[list[Group]] = []
        end = None
        for match in _DIGITS.finditer(self.text):
            gap = self.text[end : match.start()] if end is not None and match.start() - end <= 12 else None
            if gap is not None and _GAP.fullmatch(gap):
                runs[-1].append(Group(match.start(), match.end(), gap))
            else:
                runs.append([Group(match.start(), match.end(), "")])
            end = match.end()
        return runs

    @cached_property
    def long_runs(self) -> Sequence[Run]:
        """The runs that have digits enough for a telephone number."""
        return [run for run in self.runs if sum(group.end - group.start for group in run) >= FEWEST_DIGITS]

    def digits(self, groups: Sequence[Group]) -> str:
        return "".join(self.text[group.start : group.end] for group in groups)

    def before(self, start: int, num_chars: int = CONTEXT_CHARS) -> str:
        """What stands right before ``start``, in lower case."""
        return self.lower[max(0, start - num_chars) : start]

    @staticmethod
    def places(part: str, text: str) -> Iterator[int]:
        """Where ``part`` stands in ``text``."""
        place = text.find(part)
        while place >= 0:
            yield place
            place = text.find(part, place + len(part))

    def stands_alone(self, start: int, end: int) -> bool:
        """Whether no ASCII letter, digit or underscore touches [start, end)."""
        return (start == 0 or self.text[start - 1] not in WORD) and self.stops_at(end)

    def stops_at(self, end: int) -> bool:
        """Whether no ASCII letter, digit or underscore follows."""
        return end >= len(self.text) or self.text[end] not in WORD

    def locate(self, span: Span) -> Span:
        """The span with offsets into the original text."""
        if self._offsets is None:
            return span
        return Span(self._offsets[span.start], self._offsets[span.end - 1] + 1, span.value)


def windows(run: Run, first: int, fewest: int, most: int) -> Iterator[Sequence[Group]]:
    """Up to seven groups of ``run`` from ``first`` on with ``fewest`` to ``most`` digits together, longest first."""
    found, total = [], 0
    for last in range(first, min(first + MOST_GROUPS, len(run))):
        total += run[last].num_digits
        if total > most:
            break
        if total >= fewest:
            found.append(run[first : last + 1])
    return reversed(found)


def layout(groups: Sequence[Group]) -> tuple[int, ...]:
    """The number of digits of each group; groups that only a line break divides count as one."""
    sizes: list[int] = []
    for index, group in enumerate(groups):
        if index and "\n" in group.gap:
            sizes[-1] += group.num_digits
        else:
            sizes.append(group.num_digits)
    return tuple(sizes)
