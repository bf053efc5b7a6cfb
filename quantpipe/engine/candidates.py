"""The tokens a draw may choose among, and their weights: temperature, then min-p, top-k and top-p. Draws from them.

Filters keep every token that reaches a threshold, so that ties do not depend on how they are sorted. Everything is a
function of one row, computed in vocabulary order.

Shapes: V vocabulary, K candidates left of a row.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quantpipe.engine.sampling_params import SamplingParams

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

NUM_GROUP = 128  # tokens whose weights are summed, or whose largest is taken, before looking closer


@dataclass(frozen=True)
class Candidates:
    """Token ids, ascending, and their weights, which need not add up to 1. ``ids_K`` None is the whole vocabulary."""

    ids_K: Ints | None
    weight_K: Floats

    def pick(self, draw: float) -> int:
        """The token whose share of the cumulative distribution holds ``draw`` in [0, 1)."""
        weight_K = self.weight_K
        # A running sum over the vocabulary is slow: sum groups, then look inside the one that holds the draw.
        mass_G = np.cumsum(np.add.reduceat(weight_K, np.arange(0, len(weight_K), NUM_GROUP)), dtype=np.float64)
        group, share = _locate(mass_G, draw)
        start = group * NUM_GROUP
        mass_K = np.cumsum(weight_K[start : start + NUM_GROUP], dtype=np.float64)
        index = start + _locate(mass_K, share)[0]
        return index if self.ids_K is None else int(self.ids_K[index])

    def keep(self, kept_K: Ints) -> "Candidates":
        """Those at the places ``kept_K``."""
        return Candidates(kept_K if self.ids_K is None else self.ids_K[kept_K], self.weight_K[kept_K])


def candidates(logits_V: Floats, params: SamplingParams) -> Candidates:
    """What is left of a row whose largest logit is finite, for a temperature above 0."""
    found = Candidates(None, _scale(logits_V, params.temperature))  # logarithms of weights at first
    if params.min_p > 0:  # first, as top-k and exp then have far fewer to look at
        found = found.keep(np.flatnonzero(found.weight_K >= np.float32(np.log(params.min_p))))
    if 0 < params.top_k < len(found.weight_K):
        found = found.keep(_top_k(found.weight_K, params.top_k))
    np.exp(found.weight_K, out=found.weight_K)  # an array of its own by now
    if params.top_p < 1:
        found = found.keep(_nucleus(found.weight_K, params.top_p))
    return found


def _scale(logits_V: Floats, temperature: float) -> Floats:
    """Logits over temperature, the largest being 0, so that nothing can overflow but towards -inf, which is right."""
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore"):
        scaled_V: Floats = logits_V - logits_V.max()
        if temperature != 1:
            scaled_V /= np.float32(np.clip(temperature, limits.tiny, limits.max))
    return scaled_V


def _top_k(scaled_K: Floats, top_k: int) -> Ints:
    """Places of the ``top_k`` largest, and of all that equal the smallest of them."""
    num_groups = len(scaled_K) // NUM_GROUP
    bound = -np.float32(np.inf)
    if top_k < num_groups:  # k groups hold something as large as the k-th largest of their maxima: look no lower
        max_G = scaled_K[: num_groups * NUM_GROUP].reshape(NUM_GROUP, num_groups).max(0)
        bound = np.partition(max_G, -top_k)[-top_k]
    near_K = np.flatnonzero(scaled_K >= bound)
    near = scaled_K[near_K]
    kept_K: Ints = near_K[near >= np.partition(near, -top_k)[-top_k]]
    return kept_K


def _nucleus(weight_K: Floats, top_p: float) -> Ints:
    """Places of the fewest, largest weights that hold at least ``top_p`` of the total, and of what equals the last."""
    total = weight_K.sum(dtype=np.float64)
    # Weights below (1 - p) * total / K hold less than 1 - p even all together: the nucleus lies among the others.
    smallest = np.nextafter(np.float32((1 - top_p) * total / len(weight_K)), np.float32(0))
    near_K = np.flatnonzero(weight_K >= smallest)
    near = weight_K[near_K]
    sorted_near = np.sort(near)[::-1]
    num_short = int((np.cumsum(sorted_near, dtype=np.float64) < top_p * total).sum())
    kept_K: Ints = near_K[near >= sorted_near[min(num_short, len(near) - 1)]]
    return kept_K


def _locate(mass: npt.NDArray[np.float64], share: float) -> tuple[int, float]:
    """Where ``share`` of the last of these running sums falls, and what share of that one entry lies before it."""
    # Rounding must not lift the target to the total, beyond which there is nothing.
    target = min(share * mass[-1], np.nextafter(mass[-1], 0))
    index = int(mass.searchsorted(target, "right"))
    before = mass[index - 1] if index else 0.0
    return index, float((target - before) / (mass[index] - before))
