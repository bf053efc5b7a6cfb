"""What the gate of a recipe can decide with the items it has: each limit with the number it needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from quantpipe.evaluate.comparison import Comparison
from quantpipe.evaluate.power import POWER, drop_power, mean_power
from quantpipe.gate.judge import Measurement
from quantpipe.gate.limits import ACCURACY, POINTS, RECOVERY, GateLimit
from quantpipe.gate.metrics import metric_of
from quantpipe.gate.record import MEASUREMENTS_NAME
from quantpipe.recipe.schema import Recipe
from quantpipe.verdict.rejudge import with_previous
from quantpipe.verdict.results import Results
from quantpipe.verdict.stored import read_results

ASSUMED_DISCORDANCE = 0.02  # of items flip under a good 8-bit scheme
ASSUMED_ACCURACY = 0.75


@dataclass(frozen=True)
class PowerRow:
    """One limit: the samples it has and needs (None: unknown, or no number would do), and that in words."""

    label: str
    limit: str
    num_samples: int
    needed: int | None
    text: str


def power_rows(recipe: Recipe) -> tuple[PowerRow, ...]:
    """A row for each limit of a recipe, from the results stored under its output where there are any, else from its
    suite and an assumed discordance of 2 %.

    DataError for results or a suite that cannot be read, RecipeError for a recipe without limits.
    """
    recipe.require_gate()
    if (recipe.output / MEASUREMENTS_NAME).is_file():
        results = with_previous(recipe, read_results(recipe.output).results)
        return tuple(power_of(entry, results) for entry in recipe.limits)
    counts = _item_counts(recipe)
    return tuple(power_of(entry, None, counts.get(number, 0)) for number, entry in enumerate(recipe.limits))


def power_of(entry: GateLimit, results: Results | None, num_items: int = 0) -> PowerRow:
    """What a limit can decide: on ``results``, or on as many items of a suite that was not run yet."""
    if entry.figure in (POINTS, RECOVERY):
        return _of_drop(entry, results, num_items)
    if results is None:
        return _row(entry, num_items, None, "known after a first run: it depends on how much the samples vary")
    found = results.measure(entry)
    if isinstance(found, str):
        return _row(entry, 0, None, found)
    return _of_mean(entry, found)


def _of_drop(entry: GateLimit, results: Results | None, num_items: int) -> PowerRow:
    known = None if results is None else _chosen(entry, results)
    if known is not None:
        num_items = len(known.pairs)
    num_flips = 0 if known is None else len(known.lost) + len(known.gained)
    discordance = num_flips / num_items if num_flips else ASSUMED_DISCORDANCE
    accuracy = ASSUMED_ACCURACY
    if known is not None and known.pairs:
        accuracy = sum(base.score for base, _ in known.pairs) / num_items
    effect = num_items / known.num_clusters if known is not None and known.pairs else 1.0
    bound = entry.limit.bound
    margin = bound / 100 if entry.figure == POINTS else (1 - bound) * accuracy
    found = drop_power(margin, num_items, discordance, effect)
    basis = [f"{'' if num_flips else 'assumed '}{100 * discordance:.2g} % discordant"]
    basis += [f"accuracy {'' if known is not None else 'assumed '}{100 * accuracy:.3g} %"] * (entry.figure == RECOVERY)
    basis += [f"{effect:.2g} items in a cluster"] * (effect > 1)
    head = f"margin {100 * margin:.2g} point{'s' * (round(100 * margin, 9) != 1)}, n = {num_items:,}"
    if found.needed is None or found.least is None:
        return _row(entry, num_items, None, f"{head}: no number of items can show that nothing at all is lost")
    can_fail = found.failed_frac < 1
    fails = f"fails losses of {100 * found.failed_frac:.2g} points or more" if can_fail else "fails no loss for sure"
    if found.is_enough:
        text = f"{head}: enough; {fails}"
    elif found.can_pass:
        text = f"{head}: may stay unsure; needs about {_about(found.needed)}; {fails}"
    else:
        words = "cannot pass or fail" if not can_fail else "cannot pass, even without a flip"
        text = f"{head}: {words}; needs about {_about(found.needed)}; {fails}"
    return _row(entry, num_items, found.needed, f"{text} ({', '.join(basis)})")


def _chosen(entry: GateLimit, results: Results) -> Comparison | None:
    whole = results.previous if entry.vs == "previous-release" else results.comparison
    return None if whole is None else whole.select(entry.task, entry.slice)


def _of_mean(entry: GateLimit, found: Measurement) -> PowerRow:
    """Of a figure whose interval narrows with the root of the number of samples."""
    metric = metric_of(entry.figure)
    samples = "samples" if metric is None else metric.samples
    bound, is_max = entry.limit.bound, entry.limit.max is not None
    distance = bound - found.value if is_max else found.value - bound
    half_width = found.high - found.value if is_max else found.value - found.low
    if entry.figure == "manifest_mismatches":
        return _row(entry, found.num_samples, None, "counted, not sampled")
    if distance <= 0:
        text = f"the figure measured last, {found.value:.4g}, misses the limit: more {samples} will not pass it"
        return _row(entry, found.num_samples, None, text)
    needed = mean_power(half_width, found.num_samples, distance)
    if needed is None:
        return _row(entry, found.num_samples, None, f"more {samples} are needed for any interval")
    fewest = max(needed, 1 if metric is None else metric.min_samples)
    word = "enough" if found.num_samples >= fewest else f"may stay unsure; needs about {_about(fewest)} {samples}"
    text = f"n = {found.num_samples:,}, {found.value:.4g} measured last: {word}"
    return _row(entry, found.num_samples, fewest, text)


def _row(entry: GateLimit, num_samples: int, needed: int | None, text: str) -> PowerRow:
    return PowerRow(entry.label, str(entry.limit), num_samples, needed, text)


def _about(number: int) -> str:
    """Three digits, the rest zeros, rounded up: a plan promises no more."""
    step = 10 ** max(0, len(str(number)) - 3)
    return f"{-(-number // step) * step:,}"


def _item_counts(recipe: Recipe) -> Mapping[int, int]:
    """How many items of the suite each limit is about, by the limit's number."""
    if recipe.evaluate is None:
        return {}
    from quantpipe.evaluate.suite import load_suite  # loads lm-eval, which nothing else here needs

    items = [(task.name, own) for task in load_suite(recipe.evaluate.suite).tasks for own in task.item_slices]
    return {
        number: sum(
            entry.task in (None, task) and all(own.get(name) == value for name, value in entry.slice.items())
            for task, own in items
        )
        for number, entry in enumerate(recipe.limits)
        if entry.figure in (POINTS, RECOVERY, ACCURACY)
    }


def power_lines(rows: tuple[PowerRow, ...]) -> str:
    """One line for each limit, and what "needs" means."""
    lines = [f"{row.label} {row.limit}: {row.text}" for row in rows]
    meaning = f"needs: as many samples pass a candidate that loses nothing with a chance of {100 * POWER:.0f} %"
    return "\n".join([*lines, f"{meaning}; confidence 95 % on the side of the limit"])
