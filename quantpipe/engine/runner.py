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
        usable = sampler.is_usable(logits_RV)
        advanced, first = [], 0
        for advance in step.advances:
            rows = slice(first, first + advance.num_logit_rows)
            first = rows.stop
            token_id = next(token_ids) if advance.has_sample else None
            if all(usable[rows]):
                advanced.append(_read_off(logits_RV[rows], advance, token_id))
            else:
                advanced.append(Advanced(error=UNUSABLE_LOGITS))
        return advanced


def _sample(logits_RV: Floats, step: Step) -> list[int]:
    """A token for each sequence of the step that has read all of its own, chosen for all of them at once."""
    rows, params, draws, num_rows = [], [], [], 0
    for advance in step.advances:
        num_rows += advance.num_logit_rows
        if advance.has_sample:
            seq = advance.seq
            rows.append(num_rows - 1)
            params.append(seq.request.params)
            draws.append(sampler.uniform(seq.seed, seq.num_generated_tokens) if seq.request.params.temperature else 0.0)
    if not rows:
        return []
    return sampler.sample(logits_RV if len(rows) == num_rows else logits_RV[rows], params, draws)


def _read_off(logits_RV: Floats, advance: Advance, token_id: int | None) -> Advanced:
    """Log-probabilities and prompt logits of one sequence, whose rows are the last ones of its chunk."""
    seq, params = advance.seq, advance.seq.request.params
    num_top = params.logprobs or 0
    logprob = None
    if token_id is not None and params.logprobs is not None:
        [logprob] = sampler.token_logprobs(logits_RV[-1:], [token_id], num_top)

    first = advance.end - advance.num_logit_rows
    num_prompt_rows = min(advance.end, seq.num_prompt_tokens) - first if seq.request.is_scored else 0
    if num_prompt_rows <= 0:
        return Advanced(token_id, logprob)
    prompt_logprobs: list[TokenLogprob] = []
    if params.prompt_logprobs:
        next_ids = seq.request.prompt_ids[first + 1 : first + 1 + num_prompt_rows]
        prompt_logprobs = sampler.token_logprobs(logits_RV[: len(next_ids)], next_ids, num_top)
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
