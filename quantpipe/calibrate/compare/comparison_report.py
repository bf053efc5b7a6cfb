"""How a comparison of calibration sets is kept and shown. Knows plain data only, no models."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantpipe.evaluate.seed_spread import SEED_CONFIDENCE, SeedDifference, SeedSpread
from quantpipe.gate.report import figure

SCHEMA = "quantpipe.calibrate.compare.comparison/1"
COMPARISON_NAME, REPORT_NAME = "comparison.json", "comparison.md"
METRIC = "mean KL(base || candidate), nats"


@dataclass(frozen=True)
class DomainText:
    """The held-out text of one domain: where it is from, and how many windows of how many tokens."""

    label: str
    origin: str
    num_windows: int
    window_tokens: int


@dataclass(frozen=True)
class MeasuredRun:
    """One candidate: the digests of its calibration blocks and of its artifact, and its figure on each domain."""

    set_name: str
    seed: int
    calibration_digest: str
    artifact_digest: str
    mean_kl: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Comparison:
    """What came out, and what it is bound to. ``calibration`` and ``versions`` are facts for the record."""

    recipe_name: str
    base_origin: str
    base_digest: str
    seeds: tuple[int, ...]
    texts: tuple[DomainText, ...]
    runs: tuple[MeasuredRun, ...]
    spreads: tuple[SeedSpread, ...]
    differences: tuple[SeedDifference, ...]
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def rule(self) -> str:
        """In words, what "differs" means here."""
        return (
            f"differs: the {SEED_CONFIDENCE:.0%} Student's t interval of the difference, paired by seed, over "
            f"{len(self.seeds)} seeds leaves out 0; otherwise not shown to differ, which does not mean equal. It is "
            "about these texts; each line stands alone"
        )


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data for JSON."""
    record = {"schema": SCHEMA, "metric": METRIC, "rule": comparison.rule, **asdict(comparison)}
    record["runs"] = [{**asdict(run), "mean_kl": dict(run.mean_kl)} for run in comparison.runs]
    record["spreads"] = [
        {**asdict(each), "mean": each.mean, "deviation": each.deviation} for each in comparison.spreads
    ]
    record["differences"] = [
        {**asdict(each), "verdict": each.verdict, "better": each.better} for each in comparison.differences
    ]
    record["versions"] = dict(comparison.versions)
    return record


def render_text(comparison: Comparison) -> str:
    """For a terminal: a table of domains and sets, and a line for each pair on each domain."""
    names = list(dict.fromkeys(spread.name for spread in comparison.spreads))
    rows = [["domain", *names], *_rows(comparison, names)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([_title(comparison), "", *table, "", *_findings(comparison), "", comparison.rule])


def render_markdown(comparison: Comparison) -> str:
    """For a file: the same, with the texts and every run."""
    names = list(dict.fromkeys(spread.name for spread in comparison.spreads))
    lines = [f"# Calibration sets compared: {comparison.recipe_name}", "", f"{_title(comparison)}.", ""]
    lines += _table(["domain", *names], _rows(comparison, names))
    lines += ["", *(f"- {line}" for line in _findings(comparison)), "", f"{comparison.rule}.", "", "## Texts", ""]
    texts = [[text.label, text.origin, f"{text.num_windows} x {text.window_tokens}"] for text in comparison.texts]
    lines += [*_table(["domain", "from", "tokens"], texts), "", "## Runs", ""]
    domains = [text.label for text in comparison.texts]
    runs = [
        [run.set_name, str(run.seed), run.artifact_digest[:12], *(figure(dict(run.mean_kl)[name]) for name in domains)]
        for run in comparison.runs
    ]
    return "\n".join([*lines, *_table(["set", "seed", "artifact", *domains], runs)]) + "\n"


def _title(comparison: Comparison) -> str:
    seeds = ", ".join(map(str, comparison.seeds))
    return f"{METRIC}: mean and standard deviation over seeds {seeds}"


def _rows(comparison: Comparison, names: Sequence[str]) -> Iterator[list[str]]:
    found = {(spread.domain, spread.name): spread for spread in comparison.spreads}
    for text in comparison.texts:
        cells = (found[text.label, name] for name in names)
        yield [text.label, *(f"{figure(cell.mean)} +- {cell.deviation:.2g}" for cell in cells)]


def _findings(comparison: Comparison) -> Iterator[str]:
    for each in comparison.differences:
        interval = f"{SEED_CONFIDENCE:.0%} interval {figure(each.low)} .. {figure(each.high)}"
        difference = f"{each.first} - {each.second} = {figure(each.mean)} ({interval})"
        better = f", {each.better} is closer to the base model" if each.better is not None else ""
        yield f"{each.domain}: {difference}: {each.verdict}{better}"
    for spread in comparison.spreads:
        if len(set(spread.values)) == 1:
            yield f"{spread.domain}: {spread.name} gave the same figure with every seed: give it more text to draw from"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]] | Iterator[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)]
