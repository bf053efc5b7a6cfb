"""What a sequence's next token depends on besides the logits, kept up to date token by token. Draws nothing itself.

Shapes: V vocabulary, U distinct tokens of a sequence.
"""

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quantpipe.engine.constraint import Constraint
from quantpipe.engine.draws import uniform
from quantpipe.engine.sampling_params import SamplingParams
from quantpipe.engine.token_counts import TokenCounts

Floats = npt.NDArray[np.float32]


class Sampled:
    """A request's parameters, its seed, and what it has generated so far, as far as that has a bearing.

    The parameters must have passed ``check_params``. ``constraint`` is their grammar's, at its beginning, and is this
    one's own.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        seed: int = 0,
        eos_token_ids: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.num_generated = 0
        self._constraint = constraint
        self._stop_ids = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        # Only the repetition penalty asks for the prompt's tokens.
        self._counts: TokenCounts | None = None
        if params.repetition_penalty != 1:
            self._counts = TokenCounts(prompt_ids)
        elif params.frequency_penalty or params.presence_penalty:
            self._counts = TokenCounts()

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Whether each token is the one with the largest logit, once there are ``min_tokens``."""
        return self.is_greedy and self._counts is None and len(self._bias) == 0 and self._constraint is None

    @property
    def is_adjusted(self) -> bool:
        """Whether ``adjust`` would change anything."""
        if self._constraint is not None or self._counts is not None or len(self._bias) > 0:
            return True
        return self.num_generated < self.params.min_tokens

    @property
    def failure(self) -> str | None:
        """Why the grammar allows no token, where that is so."""
        return None if self._constraint is None else self._constraint.failure

    @property
    def draw(self) -> float:
        """The next token's own number in [0, 1)."""
        return uniform(self.seed, self.num_generated)

    def append(self, token_id: int) -> None:
        """Count one more generated token. Takes the same time at any length."""
        self.num_generated += 1
        if self._counts is not None:
            self._counts.add(token_id)
        if self._constraint is not None:
            self._constraint.append(token_id)

    def after(self, token_ids: Sequence[int]) -> "Sampled":
        """The same as if ``token_ids`` had been generated too; this one stays as it is."""
        later = copy.copy(self)
        later._counts = None if self._counts is None else self._counts.copy()
        later._constraint = None if self._constraint is None else self._constraint.copy()
        for token_id in token_ids:
            later.append(token_id)
        return later

    def adjust(self, logits_V: Floats) -> Floats:
        """A copy with grammar, minimum length, bias and penalties applied.

        All but the grammar is work on the tokens concerned, and nothing is work on the context.
        """
        adjusted_V = logits_V.copy()
        if self._constraint is not None:
            adjusted_V[~self._constraint.allowed_V(len(logits_V))] = -np.inf
        if self.num_generated < self.params.min_tokens:
            self._hold_back_the_end(adjusted_V)
        if len(self._bias):
            adjusted_V[self._bias_ids] += self._bias
        if self._counts is not None:
            ids_U = self._counts.ids_U
            adjusted_V[ids_U] = self._penalised(adjusted_V[ids_U], self._counts.num_times_U)
        return adjusted_V

    def _hold_back_the_end(self, logits_V: Floats) -> None:
        ends = logits_V[self._stop_ids]
        logits_V[self._stop_ids] = -np.inf
        if self._constraint is not None and not np.isfinite(logits_V.max()):
            logits_V[self._stop_ids] = ends  # the text is complete: the grammar has nothing else to say

    def _penalised(self, logits_U: Floats, num_times_U: Floats) -> Floats:
        params = self.params
        if params.repetition_penalty != 1:
            limits = np.finfo(np.float32)
            penalty = np.float32(np.clip(params.repetition_penalty, limits.tiny, limits.max))
            with np.errstate(over="ignore"):
                penalised_U = np.where(logits_U > 0, logits_U / penalty, logits_U * penalty)
            # What was -inf stays so; what is too large to say is as large as can be said, and still a token to choose.
            logits_U = np.where(np.isinf(logits_U), logits_U, np.clip(penalised_U, limits.min, limits.max))
        if params.frequency_penalty:
            logits_U = logits_U - num_times_U * np.float32(params.frequency_penalty)
        if params.presence_penalty:
            logits_U = logits_U - (num_times_U > 0).astype(np.float32) * np.float32(params.presence_penalty)
        return logits_U
