"""What can be measured of a candidate, and so limited: names, units, which direction is better. Measures nothing."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from quantpipe.gate.slice_names import TOP_K_SUFFIX, split_name

EXACT_CONFIDENCE = 0.99  # of a count, which has no sampling error; some confidence below 1 is asked for
SLICED_SAMPLES = ("windows", "items")
WORST_DOMAIN = "worst_domain_kl"


@dataclass(frozen=True)
class Metric:
    """What a figure means: its unit, which direction is better, what it is counted in, and the fewest that count.

    ``per_concurrency`` metrics are measured at each concurrency c and named ``<metric>_c<c>``; ``is_of_items`` ones can
    be measured on some of the suite's items, such as a task's.
    """

    unit: str
    better: Literal["lower", "higher"]
    text: str
    samples: str
    min_samples: int
    per_concurrency: bool = False

    @property
    def is_of_items(self) -> bool:
        """Whether it is measured on items of the suite."""
        return self.samples == "items"


METRICS: dict[str, Metric] = {
    "perplexity_ratio": Metric("ratio", "lower", "candidate perplexity / baseline perplexity", "windows", 5),
    "mean_kl": Metric(
        "nats", "lower", "mean KL divergence of next-token distributions from the baseline", "windows", 5
    ),
    "p99_kl": Metric(
        "nats", "lower", "99th percentile of that divergence over the positions of the text", "windows", 5
    ),
    WORST_DOMAIN: Metric(
        "nats", "lower", "`mean_kl` of the domain where it is largest: a limit that each domain must hold", "windows", 5
    ),
    "mean_kl_topk": Metric("nats", "lower", "`mean_kl` with `reference: stored`, a lower bound of it", "windows", 5),
    "p99_kl_topk": Metric("nats", "lower", "`p99_kl` with `reference: stored`, a lower bound of it", "windows", 5),
    "worst_domain_kl_topk": Metric(
        "nats", "lower", "`worst_domain_kl` with `reference: stored`, a lower bound of it", "windows", 5
    ),
    "top1_agreement": Metric("fraction", "higher", "positions where both rank the same token first", "windows", 5),
    "accuracy_loss_points": Metric("points", "lower", "points lost on the same items (100 x fraction)", "items", 20),
    "accuracy_recovery": Metric(
        "ratio", "higher", "candidate accuracy / baseline accuracy on the same items", "items", 20
    ),
    "accuracy": Metric(
        "fraction", "higher", "the candidate's own accuracy; only with `vs: absolute` in a list", "items", 20
    ),
    "manifest_mismatches": Metric(
        "count", "lower", "tensors and files that differ from the artifact's manifest; always checked", "tensors", 1
    ),
    "prompt_mismatches": Metric(
        "count",
        "lower",
        "texts and conversations that the artifact's tokenizer and chat template make other tokens of than the base "
        "model's; always checked",
        "texts",
        1,
    ),
    "ttft_ratio": Metric("ratio", "lower", "time to first token, candidate / baseline", "repeats", 1, True),
    "tpot_ratio": Metric("ratio", "lower", "time per output token, candidate / baseline", "repeats", 1, True),
    "output_tok_s_ratio": Metric(
        "ratio", "higher", "output tokens per second, candidate / baseline", "repeats", 1, True
    ),
}


def concurrency_of(name: str) -> int | None:
    """The c of a ``<metric>_c<c>`` name; None for a name without it."""
    match = re.fullmatch(r".+_c([1-9][0-9]*)", name)
    return int(match.group(1)) if match else None


def metric_of(name: str) -> Metric | None:
    """The metric a name stands for (``ttft_ratio_c8`` is ``ttft_ratio`` at concurrency 8, ``mean_kl[domain=legal]`` is
    ``mean_kl`` on that domain); None if it is unknown."""
    plain, fields = split_name(name) or ("", {})
    if fields:
        return METRICS[plain] if is_sliceable(plain) else None
    concurrency = concurrency_of(name)
    metric = METRICS.get(name if concurrency is None else name.removesuffix(f"_c{concurrency}"))
    return metric if metric is not None and metric.per_concurrency == (concurrency is not None) else None


def is_sliceable(name: str) -> bool:
    """Whether the metric of this name can be measured on a part of the data that has some fields."""
    metric = METRICS.get(name)
    return metric is not None and metric.samples in SLICED_SAMPLES and name.removesuffix(TOP_K_SUFFIX) != WORST_DOMAIN


def is_known_metric(name: str) -> bool:
    """Whether a limit may be set on this name."""
    return metric_of(name) is not None


def known_metric_names(concurrencies: Sequence[int] = (1, 8)) -> list[str]:
    """Every name a limit may be set on, the per-concurrency ones spelled out for these concurrencies."""
    plain = [name for name, metric in METRICS.items() if not metric.per_concurrency]
    return plain + [f"{name}_c{c}" for name, metric in METRICS.items() if metric.per_concurrency for c in concurrencies]
