"""Calibration rows against what a model will be evaluated on: equal texts, large common parts, equal groups.

The index holds hashes, never the texts. A look-up costs about as much as reading the sample, whatever the number of
evaluation texts. Nothing here says what a text says: only names of sets, files and rows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from quantpipe.calibration.checks.holdout import group_key
from quantpipe.calibration.text.words import Hashes, digest_of, ngram_hashes, text_digest, words
from quantpipe.errors import DataError

NGRAM_WORDS = 8
LEAST_SHARED_FRAC = 0.5
MIN_SAMPLE_WORDS = 2 * NGRAM_WORDS  # half of a sample that is shorter is no evidence; all of it is
MIN_LINE_WORDS = 3  # a shorter evaluation text ("yes", "Thank you") says nothing as one line of a sample
MOST_SHOWN = 10
LeakKind = Literal["exact", "near", "group"]
KINDS: tuple[LeakKind, ...] = ("exact", "near", "group")


@dataclass(frozen=True)
class EvalText:
    """One text of an evaluation: ``set`` and ``row`` are how a message names it, ``group`` its customer or thread.

    ``is_held_out``: the text is a row that the calibration set itself held out. A calibration row that overlaps it is
    left out and counted; nobody has to be asked, for the split is ours.
    """

    set: str
    row: str
    text: str
    group: str | None = None
    is_held_out: bool = False


@dataclass(frozen=True)
class Leak:
    """Why a sample may not be calibrated on: which evaluation text it overlaps, and how."""

    kind: LeakKind
    set: str
    row: str
    is_held_out: bool = False


@dataclass(frozen=True)
class _Place:
    set: str
    row: str
    is_held_out: bool

    def leak(self, kind: LeakKind) -> Leak:
        return Leak(kind, self.set, self.row, self.is_held_out)


class LeakageIndex:
    """Evaluation texts by hash, to find those that a sample overlaps."""

    def __init__(self, texts: Iterable[EvalText]) -> None:
        self._places: list[_Place] = []
        self._whole: dict[bytes, int] = {}
        self._lines: dict[bytes, int] = {}
        self._groups: dict[str, int] = {}
        self._pairs: set[int] = set()  # hashes of any two words that follow each other
        grams_of: list[Hashes] = []
        for index, each in enumerate(texts):
            self._places.append(_Place(each.set, each.row, each.is_held_out))
            of_text, digest = words(each.text), text_digest(each.text)
            if each.text.strip():
                self._whole.setdefault(digest, index)
            if len(of_text) >= MIN_LINE_WORDS:
                self._lines.setdefault(digest, index)
            if (key := group_key(each.group)) is not None:
                self._groups.setdefault(key, index)
            grams_of.append(ngram_hashes(of_text, NGRAM_WORDS))
            self._pairs.update(map(hash, pairwise(of_text)))
        self._num_grams = np.array([len(grams) for grams in grams_of], dtype=np.int64)
        self._grams, self._starts, self._owners = _postings(grams_of)

    @property
    def num_texts(self) -> int:
        return len(self._places)

    def find(self, sample_text: str, group: str | None = None) -> Leak | None:
        """The strongest overlap of a sample with an evaluation text, or None; of equal ones, the text given first.

        exact: the sample, or one line of it, is the evaluation text after normalising (a line only for a text of three
        words or more). near: half or more of the distinct runs of eight words of the evaluation text are in the sample,
        or half or more of those of the sample are in the evaluation text: all of them, if it has fewer than 16 words.
        group: they have the same group. A Chinese character counts as a word; a text of fewer than eight is never near.
        """
        if not self._places:
            return None
        words_of_lines = [of_line for line in sample_text.splitlines() if (of_line := words(line))]
        of_sample = [word for of_line in words_of_lines for word in of_line]
        found = self._exact(sample_text, of_sample, words_of_lines)
        if found is not None:
            return self._places[found].leak("exact")
        if self._may_share_run(of_sample):
            found = self._nearest(ngram_hashes(of_sample, NGRAM_WORDS), len(of_sample))
            if found is not None:
                return self._places[found].leak("near")
        key = group_key(group)
        found = None if key is None else self._groups.get(key)
        return None if found is None else self._places[found].leak("group")

    def _may_share_run(self, of_sample: list[str]) -> bool:
        """Whether every two neighbours of some run of eight words are neighbours in evaluation texts: quick to deny."""
        known = bytes(map(self._pairs.__contains__, map(hash, pairwise(of_sample))))
        return b"\1" * (NGRAM_WORDS - 1) in known

    def _exact(self, sample_text: str, of_sample: list[str], words_of_lines: list[list[str]]) -> int | None:
        digest = digest_of(" ".join(of_sample)) if of_sample else text_digest(sample_text)
        whole = self._whole.get(digest)
        in_lines = (self._lines.get(digest_of(" ".join(of_line))) for of_line in words_of_lines)
        found = [index for index in (whole, *in_lines) if index is not None]
        return min(found, default=None)

    def _nearest(self, grams: Hashes, num_words: int) -> int | None:
        """The evaluation text with the largest share of common runs, if that is large enough."""
        if not len(grams) or not len(self._grams):
            return None
        at = np.minimum(np.searchsorted(self._grams, grams), len(self._grams) - 1)
        at = at[self._grams[at] == grams]
        if not len(at):
            return None
        owners = np.concatenate([self._owners[self._starts[i] : self._starts[i + 1]] for i in at])
        candidates, num_shared = np.unique(owners, return_counts=True)
        share = num_shared / self._num_grams[candidates]
        of_sample = num_shared / len(grams)
        if num_words >= MIN_SAMPLE_WORDS:
            share = np.maximum(share, of_sample)
        else:
            share = np.where(num_shared == len(grams), 1.0, share)
        best = int(np.argmax(share))
        return int(candidates[best]) if share[best] >= LEAST_SHARED_FRAC else None


def _postings(grams_of: list[Hashes]) -> tuple[Hashes, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All distinct hashes, sorted; where the owners of each begin; and the texts that own them."""
    if not grams_of:
        return np.zeros(0, dtype=np.uint64), np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    every = np.concatenate(grams_of)
    owners = np.repeat(np.arange(len(grams_of), dtype=np.int64), [len(grams) for grams in grams_of])
    order = np.argsort(every, kind="stable")
    distinct, starts = np.unique(every[order], return_index=True)
    return distinct, np.append(starts, len(every)).astype(np.int64), owners[order]


@dataclass
class LeakReport:
    """Overlaps of one build: counted by evaluation set and kind, the first few of each set by row."""

    counts: dict[str, Counter[LeakKind]] = field(default_factory=dict)
    pairs: dict[str, list[str]] = field(default_factory=dict)
    num_held_out: int = 0

    @property
    def num_rows(self) -> int:
        """Rows that overlap, those with held-out rows included."""
        return self.num_held_out + sum(counted.total() for counted in self.counts.values())

    def add(self, where: str, leak: Leak) -> None:
        """Note that the row ``where`` (``file:row``) overlaps."""
        if leak.is_held_out:
            self.num_held_out += 1
            return
        self.counts.setdefault(leak.set, Counter())[leak.kind] += 1
        shown = self.pairs.setdefault(leak.set, [])
        if len(shown) < MOST_SHOWN:
            shown.append(f"{where} = {leak.row}")

    def lines(self, set_name: str) -> Iterator[str]:
        """One line per evaluation set, without those that were held out."""
        for eval_set, counted in self.counts.items():
            num_rows = counted.total()
            kinds = ", ".join(f"{counted[kind]} {kind}" for kind in KINDS if counted[kind])
            shown = ", ".join(self.pairs[eval_set]) + (", ..." if num_rows > len(self.pairs[eval_set]) else "")
            overlap = "1 row overlaps" if num_rows == 1 else f"{num_rows:,} rows overlap"
            yield f"calibration set {set_name}: {overlap} {eval_set} ({kinds}): {shown}"

    def raise_if_any(self, set_name: str) -> None:
        """Raise DataError, one line per evaluation set: for ``on_leakage: refuse``, once all rows were looked at."""
        lines = [f"{line}; remove them or set calibration.on_leakage: drop" for line in self.lines(set_name)]
        if lines:
            raise DataError("\n".join(lines))
