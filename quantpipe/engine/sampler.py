"""From logits to tokens and log-probabilities. Knows no sequence, cache or schedule.

A draw is the inverse of the cumulative distribution at a number that depends on the request's seed and the token's
index only, and every choice is a function of one row, so that a request's tokens do not depend on what else is in the
batch.

The largest logits of all rows are found at once. Rows that ask for more are finished one by one: a row fits in the
CPU's cache and a batch of them does not, which makes whole-batch arithmetic two to three times slower. Works on numpy
arrays, whose sort is ten times as fast as torch's on a CPU.

Shapes: R rows, one per token to choose, V vocabulary, K most likely tokens of a row.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quantpipe.engine.candidates import candidates
from quantpipe.engine.request import TokenLogprob
from quantpipe.engine.sampled import Sampled

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# Logits whose log-probabilities are computed at once: the temporaries must stay in the CPU's cache.
NUM_LOGPROB_LOGITS = 1 << 18


def is_usable(logits_RV: Floats) -> list[bool]:
    """Whether each row has a largest logit: false with a NaN, +inf, or nothing but -inf."""
    usable: list[bool] = np.isfinite(logits_RV.max(-1)).tolist()
    return usable


def sample(logits_RV: Floats, requests: Sequence[Sampled]) -> list[int | None]:
    """One token per row: the most likely where temperature is 0, else the one that the request's own draw picks.

    None where there is no token to choose: the row is not usable, or bias, penalties and minimum length make it so.
    """
    best_R = logits_RV.argmax(-1)
    usable_R = np.isfinite(logits_RV[np.arange(len(best_R)), best_R])
    token_ids: list[int | None] = []
    for row, (own, best, usable) in enumerate(zip(requests, best_R.tolist(), usable_R.tolist(), strict=True)):
        if not usable:
            token_ids.append(None)
        elif own.is_greedy and not own.is_adjusted:
            token_ids.append(best)
        else:
            token_ids.append(_choose(logits_RV[row], own))
    return token_ids


def token_logprobs(logits_RV: Floats, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probability of one given token per row, and of the ``num_top`` most likely, in nats."""
    num_rows = max(1, NUM_LOGPROB_LOGITS // logits_RV.shape[-1])
    found: list[TokenLogprob] = []
    for first in range(0, len(token_ids), num_rows):
        chunk = slice(first, first + num_rows)
        found += _token_logprobs(logits_RV[chunk], token_ids[chunk], num_top)
    return found


def _choose(logits_V: Floats, own: Sampled) -> int | None:
    if own.is_adjusted:
        logits_V = own.adjust(logits_V)
        best = int(logits_V.argmax())
        if not np.isfinite(logits_V[best]):
            return None
        if own.is_greedy:
            return best
    return candidates(logits_V, own.params).pick(own.draw)


def _token_logprobs(logits_RV: Floats, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    max_R1 = logits_RV.max(-1, keepdims=True)
    log_total_R1 = max_R1 + np.log(np.exp(logits_RV - max_R1).sum(-1, keepdims=True))
    logprobs = (np.take_along_axis(logits_RV, np.array(token_ids)[:, None], axis=-1) - log_total_R1)[:, 0].tolist()
    top: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if num_top:
        ids_RK = _top_ids(logits_RV, num_top)
        top_RK = np.take_along_axis(logits_RV, ids_RK, axis=-1) - log_total_R1
        top = [tuple(zip(*pairs, strict=True)) for pairs in zip(ids_RK.tolist(), top_RK.tolist(), strict=True)]
    rows = zip(token_ids, logprobs, logits_RV.argmax(-1).tolist(), top, strict=True)
    return [TokenLogprob(token_id, logprob, token_id == best, tops) for token_id, logprob, best, tops in rows]


def _top_ids(logits_RV: Floats, num_top: int) -> Ints:
    """The most likely tokens of each row, the most likely first."""
    num_top = min(num_top, logits_RV.shape[-1])
    ids_RK = np.argpartition(logits_RV, -num_top, axis=-1)[:, -num_top:]
    order_RK = np.argsort(-np.take_along_axis(logits_RV, ids_RK, axis=-1), axis=-1, kind="stable")
    ids: Ints = np.take_along_axis(ids_RK, order_RK, axis=-1)
    return ids
