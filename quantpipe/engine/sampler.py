"""From logits to tokens and log-probabilities. Knows no sequence, cache or schedule.

A draw is the inverse of the cumulative distribution at a number that depends on the request's seed and the token's
index only. Filters keep every token whose logit reaches a threshold, and the distribution is summed in vocabulary
order, so that a request's tokens do not depend on what else is in the batch or on how ties are sorted.

Greedy rows are decided all at once, drawn ones one by one: a row fits in the CPU's cache, a batch of them does not.
Works on numpy arrays, whose sort is ten times as fast as torch's on a CPU.

Shapes: R rows, one per token to choose, V vocabulary, K candidates left of a row.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quantpipe.engine.request import SamplingParams, TokenLogprob

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# Rows whose log-probabilities are computed at once: bounds the temporaries, which are as large as the logits.
NUM_LOGPROB_ROWS = 64


def is_usable(logits_RV: Floats) -> list[bool]:
    """Whether each row has a largest logit: false with a NaN, +inf, or nothing but -inf."""
    usable: list[bool] = np.isfinite(logits_RV.max(-1)).tolist()
    return usable


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number in [0, 1) of a seed: SplitMix64 (Steele, Lea and Flood 2014), addressed directly."""
    mask = (1 << 64) - 1
    z = _mix64(seed & mask) + (index + 1) * 0x9E3779B97F4A7C15
    return (_mix64(z & mask) >> 11) * 2.0**-53


def _mix64(z: int) -> int:
    mask = (1 << 64) - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def sample(logits_RV: Floats, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """One token per row: the most likely where temperature is 0, else the one that ``draws[r]`` in [0, 1) picks."""
    token_ids: list[int] = logits_RV.argmax(-1).tolist()
    for row, (own, draw) in enumerate(zip(params, draws, strict=True)):
        if own.temperature > 0:
            token_ids[row] = _draw(logits_RV[row], own, draw)
    return token_ids


def token_logprobs(logits_RV: Floats, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probability of one given token per row, and of the ``num_top`` most likely, in nats."""
    found: list[TokenLogprob] = []
    for first in range(0, len(token_ids), NUM_LOGPROB_ROWS):
        chunk = slice(first, first + NUM_LOGPROB_ROWS)
        found += _token_logprobs(logits_RV[chunk], token_ids[chunk], num_top)
    return found


def _draw(logits_V: Floats, params: SamplingParams, draw: float) -> int:
    """The token whose share of the cumulative distribution, after temperature, top-k and top-p, holds ``draw``."""
    scaled_V = _scale(logits_V, params.temperature)
    ids_K: Ints | None = None
    if 0 < params.top_k < len(scaled_V):  # first, as top-p then has far fewer to look at
        threshold = np.partition(scaled_V, -params.top_k)[-params.top_k]
        ids_K = np.flatnonzero(scaled_V >= threshold)
    weight_K = np.exp(scaled_V if ids_K is None else scaled_V[ids_K])
    if params.top_p < 1:
        kept_K = np.flatnonzero(weight_K >= _nucleus_threshold(weight_K, params.top_p))
        ids_K, weight_K = kept_K if ids_K is None else ids_K[kept_K], weight_K[kept_K]
    mass_K = np.cumsum(weight_K, dtype=np.float64)
    # Rounding must not lift the target to the total, beyond which there is no token.
    target = min(draw * mass_K[-1], np.nextafter(mass_K[-1], 0))
    index = int(mass_K.searchsorted(target, "right"))
    return index if ids_K is None else int(ids_K[index])


def _scale(logits_V: Floats, temperature: float) -> Floats:
    """Logits over temperature, the largest being 0, so that nothing can overflow but towards -inf, which is right."""
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore"):
        scaled_V: Floats = (logits_V - logits_V.max()) / np.float32(np.clip(temperature, limits.tiny, limits.max))
    return scaled_V


def _nucleus_threshold(weight_K: Floats, top_p: float) -> np.float32:
    """The smallest weight among the fewest, largest ones that hold at least ``top_p`` of the total."""
    needed = top_p * weight_K.sum(dtype=np.float64)
    # Weights below (1 - p) * total / K hold less than 1 - p even all together: the nucleus lies among the others.
    smallest = (1 - top_p) * weight_K.sum(dtype=np.float64) / len(weight_K)
    sorted_K = np.sort(weight_K[weight_K >= smallest])[::-1]
    num_short = int((np.cumsum(sorted_K, dtype=np.float64) < needed).sum())
    threshold: np.float32 = sorted_K[min(num_short, len(sorted_K) - 1)]
    return threshold


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
