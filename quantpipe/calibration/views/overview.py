"""A set without a tokenizer: how many rows and characters each source gives, and a few rows to look at.

Every row is read once, and of what the rows say nothing is returned but the few that were asked for, redacted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest

from quantpipe.calibration.calibration_set import BuildContext
from quantpipe.calibration.checks.leakage import LeakageIndex
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.definition.sources import RowKeys, Source
from quantpipe.calibration.sampling.survey import Survey, survey
from quantpipe.calibration.views.preview import Shown, show_sample
from quantpipe.report import Progress, no_progress

UTF8 = "utf-8"
COLUMNS = ("source", "rows", "usable", "characters", "mean")


@dataclass(frozen=True)
class SourceOverview:
    """One source: rows read, rows that can be used and their characters, and why others cannot."""

    name: str
    kind: str
    fields: Mapping[str, object]
    num_rows: int
    num_samples: int
    num_chars: int
    is_limited: bool
    dropped: Mapping[str, int]
    encodings: Mapping[str, int]


@dataclass(frozen=True)
class Overview:
    """All sources of a set, and the rows that were asked for."""

    name: str
    sources: tuple[SourceOverview, ...]
    shown: tuple[Shown, ...]


def overview(
    definition: SetDefinition,
    seed: int = 0,
    num_shown: int = 0,
    context: BuildContext = BuildContext(),  # noqa: B008  # frozen and empty
    progress: Progress = no_progress,
) -> Overview:
    """Read the whole set. Raises DataError for rows that cannot be used, as a build does.

    Shown are the rows that a build with this seed takes first, the sources in turn.
    """
    found = survey(definition, LeakageIndex(()), 0, seed, context, progress)
    found.problems.raise_if_any()
    sources = (_source(source, found, index) for index, source in enumerate(definition.sources))
    first = [
        sorted((entry for pool in pools.values() for entry in pool.entries()), key=lambda entry: entry.rank)[:num_shown]
        for pools in found.pools
    ]
    in_turns = [entry.item for entry in chain.from_iterable(zip_longest(*first)) if entry is not None]
    shown = tuple(show_sample(sample, definition, seed) for sample in in_turns[:num_shown])
    return Overview(definition.name, tuple(sources), shown)


def overview_table(sources: tuple[SourceOverview, ...]) -> str:
    """For a terminal: a line for each source, below it how it is read and what was left out."""
    rows = [COLUMNS, *(_cells(source) for source in sources)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for row, source in zip(rows, (None, *sources), strict=True):
        name, *numbers = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((name, *numbers)).rstrip())
        lines += _details(source) if source is not None else []
    return "\n".join(lines)


def _source(source: Source, found: Survey, index: int) -> SourceOverview:
    pools, reading = found.pools[index].values(), found.readings[index]
    fields = source.fields.model_dump(mode="json", exclude_defaults=True) if isinstance(source, RowKeys) else {}
    return SourceOverview(
        name=source.label,
        kind=source.kind,
        fields=fields,
        num_rows=reading.num_rows,
        num_samples=sum(pool.num_rows for pool in pools),
        num_chars=sum(pool.num_chars for pool in pools),
        is_limited=reading.is_limited,
        dropped=dict(sorted(reading.dropped.items())),
        encodings=dict(sorted(reading.encodings.items())),
    )


def _cells(source: SourceOverview) -> tuple[str, ...]:
    mean = source.num_chars / source.num_samples if source.num_samples else 0.0
    numbers = (source.num_rows, source.num_samples, source.num_chars)
    return (source.name, *(f"{number:,}" for number in numbers), f"{mean:.0f}")


def _details(source: SourceOverview) -> list[str]:
    names = ", ".join(f"{key}: {_names(value)}" for key, value in source.fields.items())
    parts = {
        "fields": names,
        "dropped": ", ".join(f"{count:,} {reason}" for reason, count in source.dropped.items() if count),
        "encodings": ", ".join(source.encodings) if set(source.encodings) - {UTF8} else "",
        "limit": "rows after it were not read" if source.is_limited else "",
    }
    return [f"  {title}: {text}" for title, text in parts.items() if text]


def _names(value: object) -> str:
    return " + ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
