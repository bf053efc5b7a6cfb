"""What must hold of the limits of a recipe's gate: known metrics, the harmful side, and what measures them.

Works on the plain data, beside the errors of single values; malformed values are left to those.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantpipe.errors import suggest
from quantpipe.gate.limits import ACCURACY, BOUNDS, DROPS, POINTS, RECOVERY, SAME_BOUND
from quantpipe.gate.metrics import METRICS, Metric, concurrency_of, is_sliceable, known_metric_names, metric_of
from quantpipe.gate.slice_names import TOP_K_SUFFIX, split_name
from quantpipe.recipe.document import KeyPath, Problem, value_at

# Unit of a metric -> whether a limit in it can mean anything, and which can.
_LEGAL_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "ratio": (lambda bound: bound > 0, "more than 0"),
    "nats": (lambda bound: bound >= 0, "0 or more"),
    "fraction": (lambda bound: 0 <= bound <= 1, "0 to 1"),
    "count": (lambda bound: bound >= 0, "0 or more"),
    "points": (lambda bound: -100 <= bound <= 100, "-100 to 100"),
}


def find_gate_conflicts(data: Mapping[str, Any]) -> Iterator[Problem]:
    """Everything in the gate, in either of its forms, that nothing could judge."""
    gate = data.get("gate")
    for name, limit in gate.items() if isinstance(gate, Mapping) else ():
        yield from _named_problems(name, limit, data)
    seen: list[Any] = []
    for index, entry in enumerate(gate if isinstance(gate, list) else ()):
        if isinstance(entry, Mapping):
            yield from _entry_problems(("gate", index), entry, data)
            same = {key: entry.get(key) for key in ("metric", "task", "slice", "vs")}
            same["bounds"] = [name for name in BOUNDS if name in entry]
            if same in seen:
                yield Problem(("gate", index), "the same limit is given before; keep one")
            seen.append(same)
    if data.get("correction") is not None and gate is None:
        yield Problem(("correction",), "there is no gate whose checks could be corrected; remove it", at_key=True)
    yield from _previous_problems(data)


def _named_problems(name: str, limit: Any, data: Mapping[str, Any]) -> Iterator[Problem]:
    path = ("gate", name)
    metric = metric_of(name)
    if metric is None or name.partition("[")[0] == ACCURACY:
        yield Problem(path, _unknown_metric(name), at_key=True, shown=("gate",))
        return
    missing = _missing_for(name, metric, data)
    if missing is not None:
        text, needs = missing
        yield Problem(path, text, at_key=True, needs=needs)
    if isinstance(limit, Mapping) and len(limit) == 1:
        yield from _limit_problems(path, metric, *next(iter(limit.items())))


def _entry_problems(path: KeyPath, entry: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with one limit of a list."""
    name = entry.get("metric")
    if not isinstance(name, str) or not name:
        return
    metric = metric_of(name)
    if metric is None:
        yield Problem((*path, "metric"), _unknown_metric(name))
        return
    plain, fields = split_name(name) or (name, {})
    if fields:
        shown = ", ".join(f"{field}: {value}" for field, value in fields.items())
        yield Problem((*path, "metric"), f"found a slice in the name; give metric: {plain} and slice: {{{shown}}}")
        return
    missing = _missing_for(name, metric, data)
    if missing is not None:
        yield Problem((*path, "metric"), missing[0], needs=missing[1])
    for key in ("task", "min_items"):
        if entry.get(key) and not metric.is_of_items:
            yield Problem((*path, key), f"{name} is not measured on items of the suite; remove it", at_key=True)
    if entry.get("slice") and not is_sliceable(name):
        yield Problem((*path, "slice"), f"{name} is not measured by slice; remove it", at_key=True)
    yield from _versus_problems(path, name, entry)
    bounds = [key for key in BOUNDS if key in entry]
    for key in bounds if len(bounds) == 1 else ():
        if key in DROPS:
            yield from _drop_problems((*path, key), name, metric, entry[key])
        else:
            yield from _limit_problems(path, metric, key, entry[key])


def _versus_problems(path: KeyPath, name: str, entry: Mapping[str, Any]) -> Iterator[Problem]:
    """A candidate is measured against its base, against an earlier release, or accuracy against nothing."""
    versus = entry.get("vs", "baseline")
    is_drop = any(key in entry for key in DROPS)
    if versus == "absolute" and (name != ACCURACY or is_drop):
        text = "a drop is from something" if is_drop else f"{name} is measured against the base model"
        yield Problem((*path, "vs"), f"{text}; remove it, or give accuracy with at_least")
    elif versus == "previous-release" and not (name in (POINTS, RECOVERY) or (name == ACCURACY and is_drop)):
        text = "only drops of accuracy are measured against an earlier release; give max_drop_points or _relative"
        yield Problem((*path, "vs"), text)
    elif name == ACCURACY and versus == "baseline" and "at_least" in entry:
        text = "found at_least without vs: absolute; add that, or give max_drop_points or max_drop_relative"
        yield Problem((*path, "at_least"), text, at_key=True)


def _drop_problems(path: KeyPath, name: str, metric: Metric, bound: Any) -> Iterator[Problem]:
    """A drop is of accuracy: other metrics have no zero that a share could be of, or are relative already."""
    side = "at_most" if metric.better == "lower" else "at_least"
    if name != ACCURACY:
        is_share = path[-1] == "max_drop_relative"
        has_zero = "is relative to the base model already" if metric.unit == "ratio" else "has no natural zero for that"
        why = has_zero if is_share else f"is in {metric.unit}"
        yield Problem(path, f"{name} {why}; give {side}, or the metric accuracy", at_key=True)
        return
    most = 100 if path[-1] == "max_drop_points" else 1
    if isinstance(bound, (int, float)) and math.isfinite(bound) and not 0 <= bound < most:
        hint = f"; did you mean max_drop_points: {bound:g}?" if most == 1 and 1 <= bound < 100 else ""
        yield Problem(path, f"found {bound:g}; allowed: 0 or more, less than {most}{hint}")


def _previous_problems(data: Mapping[str, Any]) -> Iterator[Problem]:
    """An earlier release is named where a limit is against it, and only there; it is not the one that is made."""
    gate, written = data.get("gate"), data.get("previous_release")
    entries = gate if isinstance(gate, list) else []
    against = [i for i, entry in enumerate(entries) if value_at(entry, ("vs",)) == "previous-release"]
    asked = [i for i in against if value_at(entries[i], ("metric",)) in (ACCURACY, POINTS, RECOVERY)]
    path = ("previous_release",)
    if asked and written is None:
        text = "there is no earlier release to compare with; add previous_release: <folder of its run>"
        yield Problem(("gate", asked[0], "vs"), text, needs=path)
    if written is not None and not asked:
        yield Problem(path, "no limit is against it; add one with vs: previous-release, or remove it", at_key=True)
    if isinstance(written, str) and written == data.get("output"):
        yield Problem(
            path, "found the output of this recipe, which a run overwrites; keep releases in folders of their own"
        )


def _unknown_metric(name: str) -> str:
    if name.partition("[")[0] == ACCURACY:
        return "accuracy is limited in a list: - {metric: accuracy, max_drop_points: 2}; or name accuracy_loss_points"
    if name in METRICS:
        return f"metric {name!r} is measured at each concurrency; name one, such as '{name}_c8'"
    return f"unknown metric {name!r}{suggest(name, known_metric_names())}"


def _missing_for(name: str, metric: Metric, data: Mapping[str, Any]) -> tuple[str, KeyPath] | None:
    """What the recipe lacks to measure this metric well enough to judge it, and where; None if nothing."""
    concurrency = concurrency_of(name)
    if concurrency is not None:
        bench = data.get("bench")
        if bench is None:
            return f"measured by a bench; add a bench section with concurrency {concurrency}", ("bench",)
        measured = bench.get("concurrency", [1, 8]) if isinstance(bench, Mapping) else [concurrency]
        if isinstance(measured, list) and concurrency not in measured:
            return f"bench.concurrency is {measured}; add {concurrency} to it", ("bench", "concurrency")
        if value_at(bench, ("repeats",)) == 1:
            return "one repeat gives no interval to judge; raise bench.repeats to 2 or more", ("bench", "repeats")
    elif metric.unit == "count":
        return None
    elif data.get("evaluate") is None:
        return f"measured on {metric.samples}; add an evaluate section", ("evaluate",)
    elif metric.samples == "windows":
        if value_at(data, ("evaluate", "divergence")) is None:
            return "measured on held-out text; add evaluate.divergence", ("evaluate", "divergence")
        other_reference = _other_reference(name.partition("[")[0], data)
        if other_reference is not None:
            return other_reference, ("evaluate", "divergence", "reference")
        num_windows = value_at(data, ("evaluate", "divergence", "num_windows"))
        if isinstance(num_windows, int) and num_windows < metric.min_samples:
            text = f"judged on {metric.min_samples} windows or more; raise evaluate.divergence.num_windows"
            return text, ("evaluate", "divergence", "num_windows")
    return None


def _other_reference(plain: str, data: Mapping[str, Any]) -> str | None:
    """Why the recipe's ``reference`` gives a figure of another name: a bound is never judged as the exact figure."""
    is_stored = value_at(data, ("evaluate", "divergence", "reference")) == "stored"
    if is_stored and plain + TOP_K_SUFFIX in METRICS:
        return f"reference: stored gives a lower bound of it; limit {plain}{TOP_K_SUFFIX}, or set reference: run"
    if plain.endswith(TOP_K_SUFFIX) and not is_stored:
        exact = plain.removesuffix(TOP_K_SUFFIX)
        return f"measured with evaluate.divergence.reference: stored; set that, or limit {exact}"
    return None


def _limit_problems(path: KeyPath, metric: Metric, side: str, bound: Any) -> Iterator[Problem]:
    same = SAME_BOUND.get(side, side)
    names = {"max": "min", "min": "max"} if side == same else {"max": "at_least", "min": "at_most"}
    if same not in names:
        return  # reported as an unknown key
    if same != ("max" if metric.better == "lower" else "min"):
        article = "a " if side == same else ""
        text = f"found {article}{side}; {metric.better} is better, so give {article}{names[same]}"
        yield Problem((*path, side), text, at_key=True)
    is_legal, legal = _LEGAL_BOUNDS[metric.unit]
    if isinstance(bound, (int, float)) and math.isfinite(bound) and not is_legal(bound):
        yield Problem((*path, side), f"found {bound:g} ({metric.unit}); allowed: {legal}")
