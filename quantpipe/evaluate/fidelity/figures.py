"""The gate's measurements of windows that two models have read: of all of them, and of each slice.

Knows windows that were read and what they are called, neither models nor text.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quantpipe.evaluate.fidelity.quantile import quantile_interval
from quantpipe.evaluate.fidelity.windows import DOMAIN, Compared, select
from quantpipe.evaluate.window_rows import measure_windows
from quantpipe.gate.judge import Measurement
from quantpipe.gate.metrics import METRICS, WORST_DOMAIN
from quantpipe.gate.slice_names import TOP_K_SUFFIX, sliced_name, split_name


@dataclass(frozen=True)
class SliceRow:
    """KL, in nats, of the windows where a field has a value; what the gate's measurements do not say."""

    field: str
    value: str
    num_windows: int
    median_kl: float
    max_kl: float


def slice_rows(compared: Sequence[Compared]) -> tuple[SliceRow, ...]:
    """Of each value of each field, in order of name."""
    rows = []
    for field, value in sorted({item for each in compared for item in each.fields.items()}):
        kl_WT = [each.kl_T for each in compared if each.fields.get(field) == value]
        rows.append(SliceRow(field, value, len(kl_WT), float(np.median(kl_WT)), float(np.max(kl_WT))))
    return tuple(rows)


def figures(
    compared: Sequence[Compared], fields: Mapping[str, str], confidence: float, top_k: int | None
) -> tuple[Measurement, ...]:
    """Mean and 99th percentile of KL, perplexity ratio and top-1 agreement of these windows, named after ``fields``.

    One window has no interval.
    """
    found = (
        *measure_windows([each.row for each in compared], confidence),
        _p99(compared, confidence),
    )
    if len(compared) < 2:
        found = tuple(replace(each, low=-math.inf, high=math.inf, detail="one window: no interval") for each in found)
    return tuple(_named(each, fields, top_k) for each in found)


def figure_named(name: str, compared: Sequence[Compared], confidence: float, top_k: int | None) -> Measurement | str:
    """The figure of this name, of all windows or of those with the fields in it; or why there is none."""
    plain, fields = split_name(name) or (name, {})
    chosen = select(compared, fields)
    if not chosen:
        return f"no windows with {', '.join(f'{key}={value}' for key, value in fields.items())}"
    is_worst = plain.removesuffix(TOP_K_SUFFIX) == WORST_DOMAIN
    found = sliced_figures(chosen, confidence, top_k) if is_worst else figures(chosen, fields, confidence, top_k)
    return next((each for each in found if each.name == name), "not measured")


def sliced_figures(compared: Sequence[Compared], confidence: float, top_k: int | None) -> tuple[Measurement, ...]:
    """``figures`` of each value of each field, in order of name, and the KL of the worst domain where there are any."""
    slices = sorted({item for each in compared for item in each.fields.items()})
    found = {
        (key, value): figures(select(compared, {key: value}), {key: value}, confidence, top_k) for key, value in slices
    }
    mean_kl_of = {
        value: next(m for m in of_slice if m.name.startswith("mean_kl"))
        for (key, value), of_slice in found.items()
        if key == DOMAIN
    }
    worst = (_worst(mean_kl_of, top_k),) if mean_kl_of else ()
    return (*(each for of_slice in found.values() for each in of_slice), *worst)


def _worst(mean_kl_of: Mapping[str, Measurement], top_k: int | None) -> Measurement:
    """The largest mean KL of any domain; a limit holds if it holds in each, so that choosing needs no correction."""
    worst = max(mean_kl_of, key=lambda name: mean_kl_of[name].value)
    each = mean_kl_of.values()
    return _named(
        Measurement(
            name=WORST_DOMAIN,
            value=mean_kl_of[worst].value,
            low=max(m.low for m in each),
            high=max(m.high for m in each),
            confidence=mean_kl_of[worst].confidence,
            num_samples=min(m.num_samples for m in each),
            unit="nats",
            detail=f"'{worst}', of {len(mean_kl_of)} domains; the largest ends of their intervals; n is the windows of "
            "the domain that has fewest",
        ),
        {},
        top_k,
    )


def _p99(compared: Sequence[Compared], confidence: float) -> Measurement:
    kl_N = np.concatenate([each.kl_T for each in compared])
    window_of_N = np.repeat(np.arange(len(compared)), [len(each.kl_T) for each in compared])
    low, high = (0.0, 0.0) if len(compared) < 2 else quantile_interval(kl_N, window_of_N, 0.99, confidence)
    return Measurement(
        name="p99_kl",
        value=float(np.quantile(kl_N, 0.99)),
        low=low,
        high=high,
        confidence=confidence,
        num_samples=len(compared),
        unit="nats",
        detail=f"{len(kl_N):,} positions; order statistics, windows as clusters",
    )


def _named(measurement: Measurement, fields: Mapping[str, str], top_k: int | None) -> Measurement:
    """Under the name of its slice, and of what it was measured against."""
    name, detail = measurement.name, measurement.detail
    if top_k is not None and name + TOP_K_SUFFIX in METRICS:
        name, detail = name + TOP_K_SUFFIX, f"{detail}; stored baseline, {top_k} tokens of each position: a lower bound"
    return replace(measurement, name=sliced_name(name, fields), detail=detail)
