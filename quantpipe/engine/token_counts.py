"""Which tokens a sequence holds, and how often each was generated. Knows no logits.

Shapes: U distinct tokens.
"""

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The distinct tokens of a prompt and of what was generated after it.

    ``add`` takes the same time at any length, and nothing here is larger than the vocabulary.
    """

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self._ids = np.unique(np.array(prompt_ids, dtype=np.int64))
        self._num_times = np.zeros(len(self._ids), dtype=np.float32)
        self._place_of = dict(zip(self._ids.tolist(), range(len(self._ids)), strict=True))

    @property
    def ids_U(self) -> npt.NDArray[np.int64]:
        return self._ids[: len(self._place_of)]

    @property
    def num_times_U(self) -> npt.NDArray[np.float32]:
        """How often each of ``ids_U`` was generated: 0 for one that only the prompt holds."""
        return self._num_times[: len(self._place_of)]

    def add(self, token_id: int) -> None:
        """Count one generated token."""
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = len(self._place_of)
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token_id
        self._num_times[place] += 1

    def copy(self) -> "TokenCounts":
        """Counts that go on by themselves."""
        twin = copy.copy(self)
        twin._ids, twin._num_times = self._ids.copy(), self._num_times.copy()
        twin._place_of = self._place_of.copy()
        return twin

    def _grow(self) -> None:
        num_spare = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(num_spare, dtype=np.int64)])
        self._num_times = np.concatenate([self._num_times, np.zeros(num_spare, dtype=np.float32)])
