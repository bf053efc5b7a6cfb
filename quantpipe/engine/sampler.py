"""From logits to tokens and log-probabilities, in one vectorised pass. Knows no sequence, cache or schedule.

A draw is the inverse of the cumulative distribution at a number that depends on the request's seed and the token's
index only. Filters keep every token whose logit reaches a threshold, and the distribution is summed in vocabulary
order, so that a request's tokens do not depend on what else is in the batch or on how ties are sorted.

Shapes: R rows, one per token to choose, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantpipe.engine.request import SamplingParams, TokenLogprob

# A nucleus almost never needs more tokens than this; where it does, the whole row is sorted.
NUM_SORTED_FIRST = 1024
# Rows whose log-probabilities are computed at once: bounds the temporaries, which are as large as the logits.
NUM_LOGPROB_ROWS = 64


def is_usable(logits_RV: Tensor) -> list[bool]:
    """Whether each row has a largest logit: false with a NaN, +inf, or nothing but -inf."""
    return torch.isfinite(logits_RV.amax(-1)).tolist() if len(logits_RV) else []


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


def sample(logits_RV: Tensor, params: Sequence[SamplingParams], draws: Sequence[float]) -> list[int]:
    """One token per row: the most likely where temperature is 0, else the one that ``draws[r]`` in [0, 1) picks."""
    max_R1, greedy_R = logits_RV.max(-1, keepdim=True)
    token_ids: list[int] = greedy_R.squeeze(-1).tolist()
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return token_ids
    float32 = torch.finfo(torch.float32)
    temperatures = [min(max(params[row].temperature, float32.tiny), float32.max) for row in rows]
    temperature_R1 = torch.tensor(temperatures).unsqueeze(-1)
    # The largest becomes 0 before the division, so that no temperature, however small, overflows.
    scaled_RV = (logits_RV[rows] - max_R1[rows]) / temperature_R1
    scaled_RV = keep_top_k(scaled_RV, [params[row].top_k for row in rows])
    scaled_RV = keep_top_p(scaled_RV, [params[row].top_p for row in rows])
    drawn_R = _invert_cdf(scaled_RV, torch.tensor([draws[row] for row in rows], dtype=torch.float64))
    for row, token_id in zip(rows, drawn_R.tolist(), strict=True):
        token_ids[row] = token_id
    return token_ids


def keep_top_k(scaled_RV: Tensor, top_k: Sequence[int]) -> Tensor:
    """Set to -inf what lies below the k-th largest of each row; 0 keeps all. Ties with the k-th stay."""
    vocab_size = scaled_RV.shape[-1]
    rows = [row for row, k in enumerate(top_k) if 0 < k < vocab_size]
    if not rows:
        return scaled_RV
    k_R1 = torch.tensor([top_k[row] for row in rows]).unsqueeze(-1)
    sorted_RK = scaled_RV[rows].topk(int(k_R1.max()), dim=-1).values
    return _drop_below(scaled_RV, rows, sorted_RK.gather(-1, k_R1 - 1))


def keep_top_p(scaled_RV: Tensor, top_p: Sequence[float]) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities sum to at least p, and ties with the last; 1 keeps all."""
    rows = [row for row, p in enumerate(top_p) if p < 1]
    if not rows:
        return scaled_RV
    p_R1 = torch.tensor([top_p[row] for row in rows], dtype=torch.float64).unsqueeze(-1)
    chosen_RV = scaled_RV[rows]
    total_R1 = chosen_RV.exp().sum(-1, keepdim=True, dtype=torch.float64)
    sorted_RK = chosen_RV.topk(min(NUM_SORTED_FIRST, chosen_RV.shape[-1]), dim=-1).values
    mass_RK = sorted_RK.exp().cumsum(-1, dtype=torch.float64)
    if bool((mass_RK[:, -1:] < p_R1 * total_R1).any()):
        sorted_RK = chosen_RV.sort(-1, descending=True).values
        mass_RK = sorted_RK.exp().cumsum(-1, dtype=torch.float64)
    # A token belongs to the nucleus if the mass before it is still short of p; the first always does.
    num_kept_R1 = (mass_RK < p_R1 * total_R1).sum(-1, keepdim=True).clamp_(max=sorted_RK.shape[-1] - 1)
    return _drop_below(scaled_RV, rows, sorted_RK.gather(-1, num_kept_R1))


def token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """The log-probability of one given token per row, and of the ``num_top`` most likely, in float32 nats."""
    found: list[TokenLogprob] = []
    for first in range(0, len(token_ids), NUM_LOGPROB_ROWS):
        chunk = slice(first, first + NUM_LOGPROB_ROWS)
        found += _token_logprobs(logits_RV[chunk], token_ids[chunk], num_top)
    return found


def _token_logprobs(logits_RV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    log_total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    token_ids_R1 = torch.tensor(token_ids, dtype=torch.int64).unsqueeze(-1)
    logprobs: list[float] = (logits_RV.gather(-1, token_ids_R1) - log_total_R1).squeeze(-1).tolist()
    greedy: list[int] = logits_RV.argmax(-1).tolist()
    top: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if num_top:
        values_RK, ids_RK = logits_RV.topk(min(num_top, logits_RV.shape[-1]), dim=-1)
        pairs = zip(ids_RK.tolist(), (values_RK - log_total_R1).tolist(), strict=True)
        top = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    rows = zip(token_ids, logprobs, greedy, top, strict=True)
    return [TokenLogprob(token_id, logprob, token_id == best, tops) for token_id, logprob, best, tops in rows]


def _drop_below(scaled_RV: Tensor, rows: list[int], threshold_R1: Tensor) -> Tensor:
    kept_RV = scaled_RV.clone()
    kept_RV[rows] = scaled_RV[rows].masked_fill(scaled_RV[rows] < threshold_R1, float("-inf"))
    return kept_RV


def _invert_cdf(scaled_RV: Tensor, draw_R: Tensor) -> Tensor:
    """The first token at which the cumulative weight exceeds ``draw`` of the total: never one of weight 0."""
    mass_RV = scaled_RV.exp().cumsum(-1, dtype=torch.float64)
    total_R = mass_RV[:, -1]
    # Rounding must not lift the target to the total, beyond which there is no token.
    target_R = torch.minimum(draw_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    return torch.searchsorted(mass_RV, target_R.unsqueeze(-1), right=True).squeeze(-1)
