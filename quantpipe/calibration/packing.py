"""Which samples fill the budget, and how they are cut into blocks of equal length. Knows token ids, not texts.

Samples are taken in a random order and laid end to end, each closed by its EOS; the row of tokens is cut into blocks
[num_sequences, sequence_length]. A block may begin inside a sample, and its attention crosses from one to the next.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quantpipe.calibration.account import SourceAccount


@dataclass(frozen=True)
class Packed:
    """The blocks, the account, and how many different samples are in them."""

    token_ids: npt.NDArray[np.int64]
    account: tuple[SourceAccount, ...]
    num_samples_used: int
    num_samples_distinct: int


@dataclass(frozen=True)
class _Used:
    source: int
    sample: npt.NDArray[np.int64]
    num_taken: int


@dataclass
class Selection:
    """The first samples, by random rank, that fill ``budget_tokens``: memory follows the budget, not the set."""

    budget_tokens: int
    num_sources: int
    num_samples: list[int] = field(init=False)
    num_tokens: list[int] = field(init=False)
    _held: list[tuple[float, int, int, npt.NDArray[np.int64]]] = field(default_factory=list)  # heap: worst rank first
    _num_held_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_samples = [0] * self.num_sources
        self.num_tokens = [0] * self.num_sources

    @property
    def num_tokens_available(self) -> int:
        """Tokens of all samples offered so far, over all sources."""
        return sum(self.num_tokens)

    def offer(self, source: int, rank: float, token_ids: Sequence[int]) -> None:
        """Count one sample; keep it while no samples of lower rank fill the budget without it."""
        order = sum(self.num_samples)
        self.num_samples[source] += 1
        self.num_tokens[source] += len(token_ids)
        heapq.heappush(self._held, (-rank, -order, source, np.asarray(token_ids, dtype=np.int64)))
        self._num_held_tokens += len(token_ids)
        while self._num_held_tokens - len(self._held[0][3]) >= self.budget_tokens:
            self._num_held_tokens -= len(heapq.heappop(self._held)[3])

    def pack(self, names: Sequence[str], sequence_length: int) -> Packed:
        """Cut the chosen samples into as many whole blocks as the budget allows and the tokens fill."""
        num_sequences = min(self.budget_tokens, self._num_held_tokens) // sequence_length
        num_left = num_sequences * sequence_length
        used: list[_Used] = []
        for _, _, source, token_ids in sorted(self._held, key=lambda held: held[:2], reverse=True):
            if num_left == 0:
                break
            used.append(_Used(source, token_ids, min(len(token_ids), num_left)))
            num_left -= used[-1].num_taken
        row = np.concatenate([np.zeros(0, dtype=np.int64), *(piece.sample[: piece.num_taken] for piece in used)])
        return Packed(
            token_ids=row.reshape(num_sequences, sequence_length),
            account=tuple(
                self._account(i, name, [piece for piece in used if piece.source == i]) for i, name in enumerate(names)
            ),
            num_samples_used=len(used),
            num_samples_distinct=len({piece.sample.tobytes() for piece in used}),
        )

    def _account(self, source: int, name: str, used: Sequence[_Used]) -> SourceAccount:
        return SourceAccount(
            name=name,
            num_samples_available=self.num_samples[source],
            num_samples_used=len(used),
            num_tokens_available=self.num_tokens[source],
            num_tokens_used=sum(piece.num_taken for piece in used),
            num_samples_truncated=sum(piece.num_taken < len(piece.sample) for piece in used),
        )
