"""A suite's results for the report: scores of the whole, by task, by domain, and by slice where limits are on some."""

from collections.abc import Sequence

from quantpipe.errors import DataError
from quantpipe.evaluate.comparison import Comparison
from quantpipe.gate.limits import GateLimit
from quantpipe.gate.report import ScoreRow, figure, interval_ends

WHOLE = "whole suite"


def score_rows(comparison: Comparison, limits: Sequence[GateLimit] = ()) -> tuple[ScoreRow, ...]:
    """The whole suite, then its tasks and its domains where there are several, and the slices that limits are on."""
    tasks = list(dict.fromkeys(base.task for base, _ in comparison.pairs))
    domains = [name for name in dict.fromkeys(base.domain for base, _ in comparison.pairs) if name not in tasks]
    rows = [(WHOLE, comparison)]
    rows += [(task, comparison.select(task)) for task in tasks] if len(tasks) > 1 else []
    rows += [(domain, comparison.of_domain(domain)) for domain in domains] if len(domains) > 1 else []
    rows += [(entry.items, comparison.select(entry.task, entry.slice)) for entry in limits if entry.slice]
    return tuple(_row(name, part) for name, part in dict(rows).items() if part.pairs)


def _row(name: str, part: Comparison) -> ScoreRow:
    return ScoreRow(
        name,
        len(part.pairs),
        sum(base.correct for base, _ in part.pairs),
        sum(cand.correct for _, cand in part.pairs),
        len(part.lost),
        len(part.gained),
        part.num_changed,
        part.num_near_ties,
        part.mcnemar_p,
        _recovery(part),
    )


def _recovery(part: Comparison) -> str:
    try:
        found = part.recovery()
    except DataError:  # one cluster: there is nothing to compare it with
        return "-"
    return f"{figure(100 * found.value)} % ({interval_ends(found)})"
