"""Computes one step: builds the batch, runs the model, chooses tokens, reads off prompt log-probabilities.

Changes no sequence: what came out is returned, and the engine decides what it means.

Shapes: R rows whose logits are wanted, V vocabulary.
"""

import time
from itertools import islice
from typing import NamedTuple

from quantpipe.backends.protocol import Executor, KVCache
from quantpipe.engine import sampler
from quantpipe.engine.attention_window import AttentionWindow
from quantpipe.engine.batch_builder import BatchBuilder
from quantpipe.engine.greedy import wants_most_likely
from quantpipe.engine.request import TokenLogprob
from quantpipe.engine.sampler import Floats
from quantpipe.engine.scheduler import Advance, Step
from quantpipe.engine.speculative.verify import Verification, verify
from quantpipe.engine.step_times import StepTimes

UNUSABLE_LOGITS = "model: logits are not finite; the weights or activations overflow on this input"
NO_TOKEN_LEFT = (
    "sampling: min_tokens, logit_bias and penalties leave no token with a finite logit; ask for less of them"
)


class Advanced(NamedTuple):
    """What one sequence got out of a step: new tokens, none while its prompt is being read.

    Of guessed ones the first ``num_accepted`` proved right. ``is_undecided`` says that there was no token to choose
    behind the last: only without guesses in the same step is it certain that they are not to blame.

    ``forks`` are the same for each of its pending forks, once it is read. With ``error`` the sequence cannot go on, nor
    its pending forks; ``is_nonfinite`` says that the model's logits are to blame. ``sink_failure`` is what the caller's
    own sink raised.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    is_nonfinite: bool = False
    sink_failure: Exception | None = None
    forks: "tuple[Advanced, ...]" = ()
    num_accepted: int = 0
    is_undecided: bool = False


class ModelRunner:
    """Owns the loaded model and its KV cache."""

    def __init__(self, executor: Executor, kv_cache: KVCache, window: AttentionWindow) -> None:
        self.executor = executor
        self.kv_cache = kv_cache
        self._batches = BatchBuilder(window)
        self.times = StepTimes()
        self._due_copies: list[tuple[tuple[int, int], ...]] = []

    def run(self, step: Step) -> list[Advanced]:
        """One entry per sequence of the step, in its order."""
        started_s = time.perf_counter()
        self._copy(step)
        batch = self._batches.build(step)
        built_s = time.perf_counter()
        if wants_most_likely(step):
            token_ids = self.executor.forward_greedy(batch, self.kv_cache).tolist()
            computed_s = time.perf_counter()
            advanced = _take(token_ids, step)
        else:
            logits_RV = self.executor.forward(batch, self.kv_cache).numpy()
            computed_s = time.perf_counter()
            advanced = _choose(logits_RV, step)
        self.times.batch_s += built_s - started_s
        self.times.model_s += computed_s - built_s
        self.times.sampling_s += time.perf_counter() - computed_s
        return advanced

    def _copy(self, step: Step) -> None:
        """A copy that failed stays due: block tables name its destination already, and nothing was written since."""
        if step.copies:
            self._due_copies.append(step.copies)
        while self._due_copies:
            self.kv_cache.copy_blocks(self._due_copies[0])
            del self._due_copies[0]


def _take(token_ids_R: list[int], step: Step) -> list[Advanced]:
    """What the sequences of a step get whose tokens were chosen by the backend, -1 where there was none."""
    advanced, chosen = [], iter(token_ids_R)
    for advance in step.advances:
        if not advance.num_logit_rows:
            advanced.append(Advanced())
            continue
        token_id = next(chosen)
        if token_id < 0:
            advanced.append(Advanced(error=UNUSABLE_LOGITS, is_nonfinite=True))
            continue
        own = Advanced((token_id,))
        num_forks = advance.seq.num_pending_forks
        advanced.append(own._replace(forks=(own,) * num_forks) if num_forks else own)
    return advanced


def _choose(logits_RV: Floats, step: Step) -> list[Advanced]:
    """What the sequences of a step get out of these logits."""
    verified = _verify(logits_RV, step)
    advanced, first = [], 0
    for advance, chosen in zip(step.advances, _sample(logits_RV, step), strict=True):
        rows_RV = logits_RV[first : first + advance.num_logit_rows]
        first += advance.num_logit_rows
        if advance.draft_ids:
            advanced.append(_read_verified(rows_RV, advance, verified.pop(0)))
            continue
        error = _error(rows_RV, advance, chosen)
        advanced.append(_read_off(rows_RV, advance, chosen) if error is None else error)
    return advanced


def _sample(logits_RV: Floats, step: Step) -> list[list[int | None]]:
    """For each sequence of the step that has read all of its tokens a new one, chosen for all of them at once.

    One whose prompt is now read has another for each of its pending forks, chosen from the same row.
    """
    rows, requests, num_samples, num_rows = [], [], [], 0
    for advance in step.advances:
        num_rows += advance.num_logit_rows
        is_sampled = advance.has_sample and not advance.draft_ids
        seqs = (advance.seq, *advance.seq.pending_forks) if is_sampled else ()
        num_samples.append(len(seqs))
        for seq in seqs:
            rows.append(num_rows - 1)
            requests.append(seq.sampled())
    if not rows:
        return [[] for _ in num_samples]
    is_every_row = rows == list(range(num_rows))
    token_ids = iter(sampler.sample(logits_RV if is_every_row else logits_RV[rows], requests))
    return [list(islice(token_ids, num)) for num in num_samples]


def _verify(logits_RV: Floats, step: Step) -> list[Verification]:
    """For each sequence of the step that read guesses too, which of them hold, and a token behind those."""
    verifications, num_rows = [], 0
    for advance in step.advances:
        if advance.draft_ids:
            verifications.append(Verification(advance.draft_ids, num_rows, advance.seq.sampled()))
        num_rows += advance.num_logit_rows
    verify(logits_RV, verifications)
    return verifications


def _read_verified(logits_RV: Floats, advance: Advance, verified: Verification) -> Advanced:
    """The tokens that hold and the one behind them, with their log-probabilities; each has a row of its own."""
    token_ids = [token_id for token_id in verified.chosen if token_id is not None]
    logprobs: list[TokenLogprob] = []
    num_top = advance.seq.request.params.logprobs
    if token_ids and num_top is not None:
        logprobs = sampler.token_logprobs(logits_RV[: len(token_ids)], token_ids, num_top)
    is_undecided = len(token_ids) < len(verified.chosen)
    return Advanced(tuple(token_ids), tuple(logprobs), num_accepted=verified.num_accepted, is_undecided=is_undecided)


def _error(logits_RV: Floats, advance: Advance, chosen: list[int | None]) -> Advanced | None:
    """Why a sequence cannot go on with these logits."""
    has_failed = None in chosen
    if not (has_failed or advance.seq.request.is_scored):
        return None  # a token was found, so its row is usable
    if not all(sampler.is_usable(logits_RV)):
        return Advanced(error=UNUSABLE_LOGITS, is_nonfinite=True)
    if not has_failed:
        return None
    failure = advance.seq.sampled().failure
    return Advanced(error=NO_TOKEN_LEFT if failure is None else f"grammar: {failure}; ask for a simpler one")


def _read_off(logits_RV: Floats, advance: Advance, chosen: list[int | None]) -> Advanced:
    """Log-probabilities and prompt logits of one sequence, whose rows are the last ones of its chunk."""
    seq, params = advance.seq, advance.seq.request.params
    if len(chosen) == 1 and params.logprobs is None and not seq.request.is_scored:  # almost always
        return Advanced((chosen[0],) if chosen[0] is not None else ())
    token_ids = [token_id for token_id in chosen if token_id is not None]
    samples = [Advanced((token_id,)) for token_id in token_ids]
    if token_ids and params.logprobs is not None:
        rows_RV = logits_RV[[-1] * len(token_ids)]
        logprobs = sampler.token_logprobs(rows_RV, token_ids, params.logprobs)
        samples = [Advanced((entry.token_id,), (entry,)) for entry in logprobs]
    own, *forks = samples or [Advanced()]

    first = advance.end - advance.num_logit_rows
    num_prompt_rows = min(advance.end, seq.num_prompt_tokens) - first if seq.request.is_scored else 0
    if num_prompt_rows <= 0:
        return own._replace(forks=tuple(forks)) if forks else own
    prompt_logprobs: list[TokenLogprob] = []
    if params.prompt_logprobs is not None:
        next_ids = seq.request.prompt_ids[first + 1 : first + 1 + num_prompt_rows]
        prompt_logprobs = sampler.token_logprobs(logits_RV[: len(next_ids)], next_ids, params.prompt_logprobs)
    sink_failure = _deliver(logits_RV[:num_prompt_rows], advance, first)
    return own._replace(prompt_logprobs=tuple(prompt_logprobs), sink_failure=sink_failure, forks=tuple(forks))


def _deliver(logits_RV: Floats, advance: Advance, first: int) -> Exception | None:
    sink = advance.seq.request.prompt_logits_sink
    if sink is None:
        return None
    try:
        sink(first, logits_RV)
    except Exception as failure:  # the caller's code: reported once the other sequences of the step are safe
        return failure
    return None
