"""Whether another sequence may start, given the KV blocks that those running have yet to take. Knows block counts.

- ``greedy``: there is room for its prompt, and a block for each running sequence. Fills the pool; preempts most.
- ``reserve``: there is room for all of ``max_tokens`` of everybody. Never preempts; leaves most of the pool unused.
- ``peak``: there is room for the most blocks that will be held at any time to come, if outputs are as long as those of
  late. After "Past-Future Scheduler for LLM Serving under SLA Guarantees" (ASPLOS 2025), sections 3.2 and 3.3.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.request import Sequence

Ints = npt.NDArray[np.int64]

NUM_REMEMBERED_LENGTHS = 1000
# Below that many outputs nothing is concluded from them: everyone is expected to use max_tokens.
NUM_TELLING_LENGTHS = 16
GOLDEN_RATIO_FRAC = 0.6180339887498949


class OutputLengths:
    """How many tokens the latest complete outputs had."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=NUM_REMEMBERED_LENGTHS)
        self._sum = 0
        self._sorted: Ints | None = None

    def record(self, num_tokens: int) -> None:
        if len(self._latest) == NUM_REMEMBERED_LENGTHS:
            self._sum -= self._latest[0]
        self._latest.append(num_tokens)
        self._sum += num_tokens
        self._sorted = None

    def expected(self, max_tokens: int) -> int:
        """Of a new output: the mean."""
        if len(self._latest) < NUM_TELLING_LENGTHS:
            return max_tokens
        return min(max_tokens, -(-self._sum // len(self._latest)))

    def remaining(self, num_generated: Ints, max_tokens: Ints, quantile: npt.NDArray[np.floating]) -> Ints:
        """Of outputs that have ``num_generated`` tokens, how many more they get, at a quantile of all longer ones."""
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._latest, dtype=np.int64, count=len(self._latest)))
        num_known = len(self._sorted)
        if num_known < NUM_TELLING_LENGTHS:
            return max_tokens - num_generated
        first = np.searchsorted(self._sorted, num_generated, side="right")
        found = self._sorted[np.minimum(first + (quantile * (num_known - first)).astype(np.int64), num_known - 1)]
        # No output of late was longer: it may be one that never stops by itself.
        predicted = np.where(first == num_known, max_tokens, np.minimum(found, max_tokens))
        return np.maximum(predicted, num_generated) - num_generated


class Candidate(NamedTuple):
    """A waiting sequence with what it would take: new blocks at once, and cached ones that nobody holds yet.

    Those are among the ``num_found`` that it would share.
    """

    seq: Sequence
    num_missing: int
    num_unheld: int
    num_found: int = 0


class Room(Protocol):
    """What one step has room for. Made anew when somebody waits."""

    def admits(self, candidate: Candidate, num_available: int) -> bool:
        """Whether it may start. ``num_available`` blocks can be allocated now: that it fits into them is sure."""
        ...

    def add(self, candidate: Candidate) -> None:
        """It starts."""
        ...


class GreedyRoom:
    def __init__(self, running: Iterable[Sequence], window: AttentionWindow, lengths: OutputLengths) -> None:
        self._num_running = sum(1 + seq.num_pending_forks for seq in running)

    def admits(self, candidate: Candidate, num_available: int) -> bool:
        # One block is left for each running sequence: otherwise the next step would preempt what this one admits.
        num_now = candidate.num_missing + candidate.num_unheld
        return num_now + candidate.seq.num_pending_forks + self._num_running <= num_available

    def add(self, candidate: Candidate) -> None:
        self._num_running += 1 + candidate.seq.num_pending_forks


class ReservedRoom:
    def __init__(self, running: Iterable[Sequence], window: AttentionWindow, lengths: OutputLengths) -> None:
        self._window = window
        self._num_reserved = sum(self._num_growing(seq, len(seq.block_table), seq.num_shared_blocks) for seq in running)

    def admits(self, candidate: Candidate, num_available: int) -> bool:
        num_now = candidate.num_missing + candidate.num_unheld
        return num_now + self._num_later(candidate) + self._num_reserved <= num_available

    def add(self, candidate: Candidate) -> None:
        self._num_reserved += self._num_later(candidate)

    def _num_later(self, candidate: Candidate) -> int:
        num_now = candidate.num_missing + candidate.num_found
        return self._num_growing(candidate.seq, num_now, candidate.num_found)

    def _num_growing(self, seq: Sequence, num_blocks: int, num_shared: int) -> int:
        """What it takes beyond ``num_blocks``, with the forks it will have: they share its full prompt blocks."""
        num_tokens, window = most_computed_tokens(seq), self._window
        most = window.most_blocks(num_tokens)
        if window.is_bounded:
            num_blocks -= num_shared  # it lets go of those while others may still hold them
        num_own = min(most, window.num_blocks(num_tokens) - seq.num_prompt_tokens // window.block_size)
        return max(0, most - num_blocks) + seq.num_pending_forks * num_own


class PeakRoom:
    """Blocks held are most at a time when a sequence is about to end: only those moments are looked at.

    Blocks that a sequence found in the prefix cache are taken to be held for ever, whoever else may hold them.
    """

    def __init__(self, running: Iterable[Sequence], window: AttentionWindow, lengths: OutputLengths) -> None:
        self._window = window
        self._lengths = lengths
        self._future = self._future_of([(seq, len(seq.block_table) - seq.num_shared_blocks) for seq in running])

    def admits(self, candidate: Candidate, num_available: int) -> bool:
        num_own, remaining, most = self._with(candidate)
        longest_first = np.argsort(-remaining, kind="stable")
        num_own, remaining, most = num_own[longest_first], remaining[longest_first], most[longest_first]
        # When the n-th is about to end, n have grown as much as it has, and the others have given back what they held.
        num_alive = np.arange(1, len(remaining) + 1)
        num_held = np.cumsum(num_own) + num_alive * -(-remaining // self._window.block_size)
        peak = np.minimum(num_held, np.cumsum(most)).max()
        num_growing = int(peak - num_own.sum())
        return candidate.num_missing + candidate.num_unheld + num_growing <= num_available

    def add(self, candidate: Candidate) -> None:
        self._future = self._with(candidate)

    def _with(self, candidate: Candidate) -> tuple[Ints, Ints, Ints]:
        added = self._future_of([(candidate.seq, candidate.num_missing)])
        num_own, remaining, most = (np.concatenate(pair) for pair in zip(self._future, added, strict=True))
        return num_own, remaining, most

    def _future_of(self, seqs: list[tuple[Sequence, int]]) -> tuple[Ints, Ints, Ints]:
        """The blocks of their own that sequences and their future forks hold now, how many tokens are to come, and the
        most blocks that each may ever hold.

        Each gets a draw from the distribution of longer outputs, but always the same one for the same sequence.
        """
        num_begun = len(seqs)
        seqs = seqs + [(seq, 0) for seq, _ in seqs for _ in range(seq.num_pending_forks)]
        num_generated = np.array([len(seq.token_ids) - len(seq.request.prompt_ids) for seq, _ in seqs], dtype=np.int64)
        max_tokens = np.array([seq.request.params.max_tokens for seq, _ in seqs], dtype=np.int64)
        quantile = np.array([seq.number + seq.index for seq, _ in seqs], dtype=np.int64) * GOLDEN_RATIO_FRAC % 1.0
        remaining = self._lengths.remaining(num_generated, max_tokens, quantile)
        remaining[num_begun:] += self._window.block_size  # a fork begins with a copy of a block that is partly filled
        num_own = np.array([num_own for _, num_own in seqs], dtype=np.int64)
        if not self._window.is_bounded:
            return num_own, remaining, num_own + -(-remaining // self._window.block_size)
        # Windows: prompts have no blocks yet for what they do not read in the next step.
        remaining[:num_begun] += np.array([seq.num_uncomputed_tokens for seq, _ in seqs[:num_begun]], dtype=np.int64)
        most = [self._window.most_blocks(most_computed_tokens(seq)) for seq, _ in seqs]
        return num_own, remaining, np.maximum(num_own, np.array(most, dtype=np.int64))


def most_computed_tokens(seq: Sequence) -> int:
    """The most tokens whose keys and values are ever kept: the last one is chosen but never read."""
    return seq.num_prompt_tokens + max(0, seq.request.params.max_tokens - 1)


ADMISSIONS: dict[str, Callable[[Iterable[Sequence], AttentionWindow, OutputLengths], Room]] = {
    "greedy": GreedyRoom,
    "reserve": ReservedRoom,
    "peak": PeakRoom,
}
