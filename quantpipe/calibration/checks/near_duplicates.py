"""Near duplicates among texts that come one after another: MinHash finds candidates, exact similarity decides.

Similarity is Jaccard's, of the sets of runs of three words (characters in scripts without spaces). Meant for the rows
that a build considers, not for whole files: memory is 8 bytes per word of the texts kept, and about 6 kB for each text.
"""

from typing import Any

import numpy as np

from quantpipe.calibration.text.words import Hashes, digest_of, ngram_hashes, normalised
from quantpipe.report import random_state_kept

SHINGLE_WORDS = 3
NUM_PERMUTATIONS = 64
LEAST_RECALL = 0.999
_CHUNK = 4096  # shingles hashed at once: 64 permutations of them take 2 MB


class NearDuplicates:
    """The texts seen so far that were new. The outcome depends on the order of the texts alone."""

    def __init__(self, threshold: float) -> None:
        """``threshold``: Jaccard similarity, above 0 and at most 1, from which a text counts as a duplicate."""
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"threshold is {threshold}; allowed: above 0, at most 1")
        from datasketch import MinHash, MinHashLSH  # heavy: imports scipy

        self._threshold = threshold
        with random_state_kept():  # the library draws a name for its tables
            self._index: Any = MinHashLSH(num_perm=NUM_PERMUTATIONS, params=lsh_bands(threshold))
        self._blank: Any = MinHash(NUM_PERMUTATIONS, seed=1, hashfunc=int, scheme="affine64")
        self._kept: list[Hashes] = []

    def is_new(self, text: str) -> bool:
        """Keep ``text`` and return True, unless its similarity to a text kept before reaches the threshold.

        Never False for a text below the threshold; a pair at or above it is missed with a chance below 0.001 (for
        thresholds of 0.2 or more). A duplicate is not kept: of a chain of texts, each like the one before, the first is
        kept and those that are far from it.
        """
        found = shingles(text)
        sketch = self._blank.copy()
        for start in range(0, len(found), _CHUNK):
            sketch.update_batch(found[start : start + _CHUNK].tolist())
        if any(jaccard(found, self._kept[index]) >= self._threshold for index in self._index.query(sketch)):
            return False
        self._index.insert(len(self._kept), sketch)
        self._kept.append(found)
        return True


def shingles(text: str) -> Hashes:
    """The distinct runs of three words of ``text``; a shorter text is one run, so the result is never empty."""
    reduced = normalised(text)
    runs = ngram_hashes(reduced.split(" "), SHINGLE_WORDS)
    whole = int.from_bytes(digest_of(reduced)[:8], "little")
    return runs if len(runs) else np.array([whole], dtype=np.uint64)


def jaccard(left: Hashes, right: Hashes) -> float:
    """Size of the intersection over size of the union, of two sets that are not both empty."""
    num_shared = len(np.intersect1d(left, right, assume_unique=True))
    return num_shared / (len(left) + len(right) - num_shared)


def lsh_bands(threshold: float) -> tuple[int, int]:
    """Bands, and rows in each, that find a pair at the threshold with a chance of at least 0.999, if any do.

    b bands of r rows find a pair of similarity s with chance 1 - (1 - s^r)^b (Leskovec, Rajaraman, Ullman, Mining of
    Massive Datasets, 3.4.2). The most rows that suffice: they bring the fewest candidates to compare.
    """
    for num_rows in range(NUM_PERMUTATIONS // 2, 1, -1):
        num_bands = NUM_PERMUTATIONS // num_rows
        if 1.0 - (1.0 - threshold**num_rows) ** num_bands >= LEAST_RECALL:
            return num_bands, num_rows
    return NUM_PERMUTATIONS, 1
