"""Computes one step: builds the batch, runs the model, chooses tokens, reads off prompt log-probabilities.

Changes no sequence: what came out is returned, and the engine decides what it means.

Shapes: R rows whose logits are wanted, V vocabulary.
"""

from dataclasses import dataclass

from quantpipe.backends.protocol import Executor, KVCache
from quantpipe.engine import sampler
from quantpipe.engine.batch import build_batch
from quantpipe.engine.request import TokenLogprob
from quantpipe.engine.sampler import Floats
from quantpipe.engine.scheduler import Advance, Step

UNUSABLE_LOGITS = "model: logits are not finite; the weights or activations overflow on this input"
NO_TOKEN_LEFT = (
    "sampling: min_tokens, logit_bias and penalties leave no token with a finite logit; ask for less of them"
)


@dataclass(frozen=True)
class Advanced:
    """What one sequence got out of a step: a new token or None while its prompt is being read.

    With ``error`` the request cannot go on; ``sink_failure`` is what the caller's own sink raised.
    """

    token_id: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    sink_failure: Exception | None = None


class ModelRunner:
    """Owns the loaded model and its KV cache."""

    def __init__(self, executor: Executor, kv_cache: KVCache) -> None:
        self.executor = executor
        self.kv_cache = kv_cache

    def run(self, step: Step) -> list[Advanced]:
        """One entry per sequence of the step, in its order."""
        logits_RV = self.executor.forward(build_batch(step, self.kv_cache.block_size), self.kv_cache).numpy()
        token_ids = iter(_sample(logits_RV, step))
        advanced, first = [], 0
        for advance in step.advances:
            rows_RV = logits_RV[first : first + advance.num_logit_rows]
            first += advance.num_logit_rows
            token_id = next(token_ids) if advance.has_sample else None
            error = _error(rows_RV, advance, token_id)
            advanced.append(_read_off(rows_RV, advance, token_id) if error is None else Advanced(error=error))
        return advanced


def _sample(logits_RV: Floats, step: Step) -> list[int | None]:
    """A token for each sequence of the step that has read all of its own, chosen for all of them at once."""
    rows, requests, num_rows = [], [], 0
    for advance in step.advances:
        num_rows += advance.num_logit_rows
        if advance.has_sample:
            rows.append(num_rows - 1)
            requests.append(advance.seq.sampled())
    if not rows:
        return []
    return sampler.sample(logits_RV if len(rows) == num_rows else logits_RV[rows], requests)


def _error(logits_RV: Floats, advance: Advance, token_id: int | None) -> str | None:
    """Why a sequence cannot go on with these logits."""
    has_failed = advance.has_sample and token_id is None
    if not (has_failed or advance.seq.request.is_scored):
        return None  # a token was found, so its row is usable
    if not all(sampler.is_usable(logits_RV)):
        return UNUSABLE_LOGITS
    return NO_TOKEN_LEFT if has_failed else None


def _read_off(logits_RV: Floats, advance: Advance, token_id: int | None) -> Advanced:
    """Log-probabilities and prompt logits of one sequence, whose rows are the last ones of its chunk."""
    seq, params = advance.seq, advance.seq.request.params
    logprob = None
    if token_id is not None and params.logprobs is not None:
        [logprob] = sampler.token_logprobs(logits_RV[-1:], [token_id], params.logprobs)

    first = advance.end - advance.num_logit_rows
    num_prompt_rows = min(advance.end, seq.num_prompt_tokens) - first if seq.request.is_scored else 0
    if num_prompt_rows <= 0:
        return Advanced(token_id, logprob)
    prompt_logprobs: list[TokenLogprob] = []
    if params.prompt_logprobs is not None:
        next_ids = seq.request.prompt_ids[first + 1 : first + 1 + num_prompt_rows]
        prompt_logprobs = sampler.token_logprobs(logits_RV[: len(next_ids)], next_ids, params.prompt_logprobs)
    sink_failure = _deliver(logits_RV[:num_prompt_rows], advance, first)
    return Advanced(token_id, logprob, tuple(prompt_logprobs), sink_failure=sink_failure)


def _deliver(logits_RV: Floats, advance: Advance, first: int) -> Exception | None:
    sink = advance.seq.request.prompt_logits_sink
    if sink is None:
        return None
    try:
        sink(first, logits_RV)
    except Exception as failure:  # the caller's code: reported once the other sequences of the step are safe
        return failure
    return None
