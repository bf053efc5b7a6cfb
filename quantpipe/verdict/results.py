"""Everything that a run measured and its gate judges, and the figure that each limit is about. Measures no model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from quantpipe.bench.latency import paired_ratio
from quantpipe.errors import DataError, RecipeError
from quantpipe.evaluate.comparison import Comparison, unknown_scope
from quantpipe.evaluate.fidelity.figures import figure_named, figures, sliced_figures
from quantpipe.evaluate.fidelity.windows import Compared, unknown_fields
from quantpipe.evaluate.intervals import DEFAULT_CONFIDENCE
from quantpipe.evaluate.items import ItemResult
from quantpipe.gate.judge import GateResult, Measurement, judge_limits
from quantpipe.gate.limits import ACCURACY, POINTS, RECOVERY, GateLimit, Limit
from quantpipe.gate.metrics import metric_of
from quantpipe.recipe.schema import Recipe

MANIFEST, PROMPTS = "manifest_mismatches", "prompt_mismatches"
# Figures of as many windows as were asked for.
WINDOW_METRICS = ("perplexity_ratio", "mean_kl", "mean_kl_topk", "top1_agreement", "p99_kl", "p99_kl_topk")


@dataclass(frozen=True)
class Results:
    """``comparison`` is of the suite's items, ``bench`` the (baseline, candidate) figures of each round by metric.

    ``num_items`` and ``num_windows`` are how many were asked for, ``mismatches`` the count of what differs from the
    artifact's manifest: None for a folder without one. ``prompts`` counts what the candidate reads as other tokens than
    the baseline does. ``top_k`` says that the windows are compared with a stored baseline, with so many tokens of each
    position. ``previous`` pairs the items of an earlier release (first) with those of the candidate.
    """

    comparison: Comparison | None = None
    windows: tuple[Compared, ...] = ()
    top_k: int | None = None
    bench: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    mismatches: Measurement | None = None
    prompts: Measurement | None = None
    num_items: int = 0
    num_windows: int = 0
    previous: Comparison | None = None

    def measure(self, entry: GateLimit, confidence: float = DEFAULT_CONFIDENCE) -> Measurement | str:
        """The figure that a limit is about, at a confidence; or why there is none."""
        metric = metric_of(entry.figure)
        try:
            if metric is not None and metric.is_of_items:
                return self._of_items(entry, confidence)
            return self._of_model(entry.figure, confidence)
        except DataError as error:  # too few to tell, a score that is no number
            return str(error)

    def measurements(self, confidence: float = DEFAULT_CONFIDENCE) -> Iterator[Measurement]:
        """Every figure of the whole, and of each slice of the windows, limited or not."""
        if self.windows:
            yield from figures(self.windows, {}, confidence, self.top_k)
            yield from sliced_figures(self.windows, confidence, self.top_k)
        names = [*self.bench, *([POINTS, RECOVERY] if self.comparison is not None else [])]
        names += [MANIFEST] if self.mismatches is not None else []
        names += [PROMPTS] if self.prompts is not None else []
        for name in names:
            found = self.measure(any_limit(name), confidence)
            if isinstance(found, Measurement):
                yield found

    def _of_items(self, entry: GateLimit, confidence: float) -> Measurement | str:
        whole = self.previous if entry.vs == "previous-release" else self.comparison
        if whole is None:
            return "not measured"
        chosen = whole.select(entry.task, entry.slice)
        if not chosen.pairs:
            return f"no items of {entry.scope or 'the suite'}"
        if entry.figure == ACCURACY:
            return chosen.own(confidence)
        return chosen.loss(confidence) if entry.figure == POINTS else chosen.recovery(confidence)

    def _of_model(self, name: str, confidence: float) -> Measurement | str:
        if name == MANIFEST:
            return self.mismatches or "not measured"
        if name == PROMPTS:
            return self.prompts or "not measured"
        if name in self.bench:
            return paired_ratio(name, self.bench[name], confidence)
        return figure_named(name, self.windows, confidence, self.top_k) if self.windows else "not measured"


def any_limit(name: str) -> GateLimit:
    """A limit on a figure of the whole, to measure it by."""
    metric = metric_of(name)
    is_lower = metric is None or metric.better == "lower"
    return GateLimit.of(name, Limit(max=0.0) if is_lower else Limit(min=0.0))


def limits_of(recipe: Recipe, results: Results) -> tuple[GateLimit, ...]:
    """The recipe's limits, and that nothing differs from a manifest that is there, or is read as other tokens."""
    counted = [each.name for each in (results.mismatches, results.prompts) if each is not None]
    limited = {entry.figure for entry in recipe.limits}
    return (*recipe.limits, *(GateLimit.of(name, Limit(max=0.0)) for name in counted if name not in limited))


def limit_path(recipe: Recipe, number: int, part: str) -> str:
    """What a refusal begins with that is about this key of a limit: in a mapping, the name says it all."""
    if isinstance(recipe.gate, tuple):
        return f"gate[{number}].{part}"
    name = list(recipe.gate)[number]
    return f"gate: {name}" if "[" in name else f"gate.{name}"


def check_scopes(recipe: Recipe, items: Sequence[ItemResult]) -> None:
    """Raise RecipeError for a limit on a task or slice that none of the suite's items has."""
    for number, entry in enumerate(recipe.limits):
        problem = unknown_scope(items, entry.task, entry.slice) if entry.is_of_items else None
        if problem is not None:
            part, _, text = problem.partition(": ")
            raise RecipeError(f"{limit_path(recipe, number, part)}: {text}")


def check_window_slices(recipe: Recipe, fields: Sequence[Mapping[str, str]]) -> None:
    """Raise RecipeError for a limit on a slice of held-out text that no window has; ``fields`` are those of each."""
    for number, entry in enumerate(recipe.limits):
        problem = unknown_fields(fields, entry.slice) if entry.slice and not entry.is_of_items else None
        if problem is not None:
            raise RecipeError(f"{limit_path(recipe, number, 'slice')}: {problem}")


def judge_results(recipe: Recipe, results: Results, today: date | None = None) -> GateResult:
    """The verdict of a recipe's gate. RecipeError for a limit on what no item or window has."""
    if results.comparison is not None:
        check_scopes(recipe, [cand for _, cand in results.comparison.pairs])
    if results.windows:
        check_window_slices(recipe, [window.fields for window in results.windows])
    limits = limits_of(recipe, results)
    expected = dict.fromkeys(WINDOW_METRICS, results.num_windows) | {POINTS: results.num_items}
    expected |= {RECOVERY: results.num_items, ACCURACY: results.num_items}
    limited = {entry.figure for entry in limits if not entry.scope}
    informational = [m for m in results.measurements() if m.name not in limited]
    return judge_limits(limits, results.measure, expected, informational, recipe.correction, today)
