"""How many items each model got right, and which of them flipped."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quantpipe.gate.report import ScoreRow
from quantpipe.reporting.exhibits import Bar, Bars, Column, Exhibit, Table
from quantpipe.reporting.report import ReportSection
from quantpipe.wording import count_of

MOST_FLIPS = 500
COLUMNS = (
    Column("task"),
    Column("items", "count"),
    Column("baseline correct", "count"),
    Column("candidate correct", "count"),
    Column("lost", "count"),
    Column("gained", "count"),
    Column("changed", "count"),
    Column("near ties", "count"),
    Column("McNemar p", "figure"),
    Column("recovery"),
)


@dataclass(frozen=True)
class FlipRow:
    """An item that one model has right and the other wrong: its names, never its text.

    ``is_near_tie``: whether both models hardly preferred their best choice to the next; None where there are none.
    """

    task: str
    doc_id: str
    domain: str
    is_lost: bool
    is_near_tie: bool | None = None
    cluster: str = ""
    slices: Mapping[str, str] = field(default_factory=dict)


def suite_section(scores: Sequence[ScoreRow], flips: Sequence[FlipRow] = ()) -> ReportSection:
    """The suite; one that was not asked has no exhibits."""
    if not scores:
        return ReportSection("suite", "Suite")
    rows = tuple(
        (
            *(s.task, s.num_items, s.baseline_correct, s.candidate_correct, s.num_lost, s.num_gained),
            *(s.num_changed, s.num_near_ties, s.mcnemar_p, s.recovery),
        )
        for s in scores
    )
    shares = tuple(Bar(s.task, (s.candidate_correct / s.num_items, s.baseline_correct / s.num_items)) for s in scores)
    turned = tuple(Bar(s.task, (float(s.num_gained), float(s.num_lost))) for s in scores)
    exhibits: list[Exhibit] = [
        Table("Suite", COLUMNS, rows),
        Bars("Correct items", "task", ("candidate", "baseline"), shares, form="percent"),
        Bars("Flips, both ways", "task", ("gained", "lost"), turned, "items", "count"),
    ]
    if flips:
        exhibits.append(_flips(flips))
    return ReportSection("suite", "Suite", tuple(exhibits))


def _flips(flips: Sequence[FlipRow]) -> Table:
    columns = (
        Column("item"), Column("task"), Column("domain"), Column("flip"), Column("near tie"), Column("cluster"),
        Column("slices"),
    )  # fmt: skip
    ordered = sorted(flips, key=lambda flip: (flip.domain, not flip.is_lost, flip.cluster, flip.task, flip.doc_id))
    rows = tuple(
        (
            flip.doc_id,
            flip.task,
            flip.domain,
            "lost" if flip.is_lost else "gained",
            {None: None, True: "yes", False: "no"}[flip.is_near_tie],
            None if flip.cluster in ("", flip.doc_id) else flip.cluster,
            ", ".join(f"{name} {value}" for name, value in flip.slices.items()) or None,
        )
        for flip in ordered[:MOST_FLIPS]
    )
    ties = Counter(flip.is_near_tie for flip in flips)
    known = f"{ties[True]:,} of them near ties" if ties[None] < len(flips) else "by what margin is not known"
    note = f"{count_of(len(flips), 'flips')}, {known}. Texts are left out."
    if len(flips) > MOST_FLIPS:
        note += f" The first {MOST_FLIPS} are listed."
    return Table("Flipped items", columns, rows, note, long=len(rows) > 25)
