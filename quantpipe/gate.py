"""Whether a candidate may be released: limits against measurements that carry their uncertainty.

Three-valued and fail closed. Knows numbers and names only; not how anything was measured, nor how it is shown.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantpipe.errors import EXIT_GATE_FAILED, EXIT_PASS, EXIT_UNSURE, RecipeError

MIN_CONFIDENCE = 0.90  # two-sided, i.e. 95 % on the side of the limit
MAX_USEFUL_SAMPLES = 10**7  # above this, "how many samples would decide" is no longer advice


@dataclass(frozen=True)
class Measurement:
    """One figure with its two-sided interval ``[low, high]`` at ``confidence``, from ``num_samples`` samples.

    An interval that could not be computed (one repeat, say) is ``[-inf, inf]``: it decides nothing.
    """

    name: str
    value: float
    low: float
    high: float
    confidence: float
    num_samples: int
    unit: str
    detail: str = ""


@dataclass(frozen=True)
class Metric:
    """What a figure means: its unit, which direction is better, what it is counted in, and the fewest that count.

    ``per_concurrency`` metrics are measured at each concurrency c and named ``<metric>_c<c>``.
    """

    unit: str
    better: Literal["lower", "higher"]
    text: str
    samples: str
    min_samples: int
    per_concurrency: bool = False


METRICS: dict[str, Metric] = {
    "perplexity_ratio": Metric("ratio", "lower", "candidate perplexity / baseline perplexity", "windows", 5),
    "mean_kl": Metric(
        "nats", "lower", "mean KL divergence of next-token distributions from the baseline", "windows", 5
    ),
    "top1_agreement": Metric("fraction", "higher", "positions where both rank the same token first", "windows", 5),
    "accuracy_loss_points": Metric("points", "lower", "points lost on the same items (100 x fraction)", "items", 20),
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
    """The metric a name stands for (``ttft_ratio_c8`` is ``ttft_ratio`` at concurrency 8); None if it is unknown."""
    concurrency = concurrency_of(name)
    metric = METRICS.get(name if concurrency is None else name.removesuffix(f"_c{concurrency}"))
    return metric if metric is not None and metric.per_concurrency == (concurrency is not None) else None


def is_known_metric(name: str) -> bool:
    """Whether a limit may be set on this name."""
    return metric_of(name) is not None


def known_metric_names(concurrencies: Sequence[int] = (1, 8)) -> list[str]:
    """Every name a limit may be set on, the per-concurrency ones spelled out for these concurrencies."""
    plain = [name for name, metric in METRICS.items() if not metric.per_concurrency]
    return plain + [f"{name}_c{c}" for name, metric in METRICS.items() if metric.per_concurrency for c in concurrencies]


class Verdict(StrEnum):
    """PASS, FAIL, or UNSURE: the samples do not decide."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSURE = "UNSURE"

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        return {Verdict.PASS: EXIT_PASS, Verdict.FAIL: EXIT_GATE_FAILED, Verdict.UNSURE: EXIT_UNSURE}[self]


FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


class Limit(BaseModel):
    """The worst value still accepted: ``max`` or ``min``, exactly one. A value equal to the limit is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    max: FiniteFloat | None = None
    min: FiniteFloat | None = None

    @model_validator(mode="after")
    def _has_exactly_one_bound(self) -> "Limit":
        if (self.max is None) == (self.min is None):
            raise ValueError("a limit has exactly one of max and min")
        return self

    @property
    def bound(self) -> float:
        """The number itself, whichever side it bounds."""
        bound = self.max if self.max is not None else self.min
        assert bound is not None  # the validator has seen to it
        return bound

    def __str__(self) -> str:
        return f"{'<=' if self.max is not None else '>='} {self.bound:g}"


def limit_problem(name: str, limit: Limit) -> str | None:
    """Why this limit cannot be judged (unknown metric, or it bounds the harmless side); None if it can."""
    metric = metric_of(name)
    if metric is None:
        return "unknown metric"
    if (metric.better == "lower") != (limit.max is not None):
        wanted = "max" if metric.better == "lower" else "min"
        return f"{metric.better} is better, so the limit must be a {wanted}"
    return None
