"""Texts behind one context as a tree of tokens, and the log-probability of each token in it, from rows of logits.

Shapes: R rows of one chunk, V vocabulary.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from quantpipe.engine.request import PromptLogitsSink
from quantpipe.errors import DataError

ScoredPair = tuple[float, bool]  # log-likelihood, and whether greedy decoding would have produced the text
Path = tuple[int, ...]  # tokens behind the context


class ScoreTree:
    """Fill it with texts, run a prompt for each of its ``paths`` with its ``sink``, then take each text's ``score``."""

    def __init__(self, num_context_tokens: int) -> None:
        self._first = num_context_tokens - 1  # the position whose logits are of the first token behind the context
        self._next: dict[Path, set[int]] = {}
        self._found: dict[Path, dict[int, ScoredPair]] = {}

    def add(self, text: Path) -> None:
        """A text of one token or more."""
        for depth, token_id in enumerate(text):
            self._next.setdefault(text[:depth], set()).add(token_id)

    def paths(self) -> list[Path]:
        """What must be read behind the context so that the logits of every token are seen: no path begins another."""
        inner = {path[:-1] for path in self._next if path}
        return [path for path in self._next if path not in inner]

    def sink(self, path: Path) -> PromptLogitsSink:
        """Takes the logits of a prompt that is the context with ``path`` behind it."""

        def take(first: int, logits_RV: npt.NDArray[np.float32]) -> None:
            for row in range(max(self._first - first, 0), min(len(logits_RV), self._first + len(path) + 1 - first)):
                node = path[: first + row - self._first]
                if node not in self._found:  # prompts that share tokens show the same row
                    self._found[node] = _scored(logits_RV[row], self._next[node])

        return take

    def score(self, text: Path) -> ScoredPair:
        """Natural-log probability of a text that was added. DataError where logits are missing or broken."""
        try:
            tokens = [self._found[text[:depth]][token_id] for depth, token_id in enumerate(text)]
        except KeyError:
            raise DataError(f"evaluate: the engine returned no logits for some of {len(text)} tokens") from None
        loglikelihood = math.fsum(logprob for logprob, _ in tokens)
        if not math.isfinite(loglikelihood):
            raise DataError(f"evaluate: log-likelihood {loglikelihood} of {len(text)} tokens; the logits are broken")
        return loglikelihood, all(is_greedy for _, is_greedy in tokens)


def _scored(logits_V: npt.NDArray[np.float32], token_ids: set[int]) -> dict[int, ScoredPair]:
    row_V = torch.from_numpy(logits_V).double()
    total, best = float(row_V.logsumexp(-1)), int(row_V.argmax())
    return {token_id: (float(row_V[token_id]) - total, token_id == best) for token_id in token_ids}
