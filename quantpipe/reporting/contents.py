"""All sections of a report in reading order: the given ones, and those that follow from its verdict and context."""

from collections.abc import Mapping, Sequence

from quantpipe.gate.judge import Measurement
from quantpipe.gate.report import figure, interval
from quantpipe.reporting.exhibits import Code, Column, Exhibit, Facts, Interval, Intervals, Table, Text
from quantpipe.reporting.report import CheckRow, Report, ReportSection

# What a report always has, in this order; what it has besides comes before the last of these.
ORDER = (
    ("suite", "Suite"),
    ("divergence", "Divergence"),
    ("layers", "Errors by layer"),
    ("coverage", "Calibration coverage"),
    ("bench", "Bench"),
    ("memory", "Memory"),
    ("parity", "Parity"),
    ("quantization", "Quantization"),
)
CHECK_COLUMNS = (
    Column("verdict"),
    Column("metric"),
    Column("limit"),
    Column("measured"),
    Column("interval"),
    Column("n", "count"),
    Column("why"),
)


def sections_of(report: Report) -> tuple[ReportSection, ...]:
    """Every section but the head and the checks."""
    given = {section.id: section for section in report.sections}
    sliced, plain = _by_slice(report)
    for metric, plot in sliced.items():
        home = "suite" if metric.startswith("accuracy") else "divergence"
        old = given.get(home, ReportSection(home, dict(ORDER)[home]))
        given[home] = ReportSection(old.id, old.title, (*old.exhibits, plot), old.if_empty)
    known = [given.pop(name, ReportSection(name, title)) for name, title in ORDER]
    return (
        *known[:-1],
        *given.values(),
        ReportSection("unlimited", "Measured without a limit", _unlimited(plain)),
        known[-1],
        ReportSection("recipe", "Recipe", (Code(report.recipe, "yaml"),) if report.recipe else (), "Not recorded."),
        ReportSection("environment", "Environment", _environment(report)),
        ReportSection("provenance", "What this verdict is bound to", (Facts(_bound_to(report)),)),
        ReportSection("reproduce", "How to reproduce", _commands(report.commands), "Not recorded."),
    )


def checks_table(report: Report) -> Table:
    """The checks as rows of text."""
    return Table("Checks", CHECK_COLUMNS, tuple(_check_cells(check) for check in report.checks), report.correction)


def meanings(checks: Sequence[CheckRow]) -> Text:
    """What the metrics of the checks are."""
    found = {check.metric: check.meaning for check in checks if check.meaning}
    return Text(tuple(f"{metric}: {meaning}" for metric, meaning in found.items()), bullets=True)


def slice_of(name: str) -> tuple[str, str] | None:
    """Metric and slice of a name such as ``mean_kl[domain=legal]``; None for a name without one."""
    metric, _, rest = name.partition("[")
    return (metric, rest.removesuffix("]")) if metric and rest.endswith("]") else None


def _check_cells(check: CheckRow) -> tuple[str | int | None, ...]:
    why = "; ".join((check.reason, *check.remarks))
    measured = check.measurement
    if measured is None:
        return check.outcome, check.metric, check.limit, None, None, None, why
    return (
        check.outcome,
        check.metric,
        check.limit,
        value_with_unit(measured),
        interval(measured),
        measured.num_samples,
        why,
    )


def value_with_unit(measured: Measurement) -> str:
    """``0.0124 nats``; a ratio or a count has no unit."""
    return (
        figure(measured.value) if measured.unit in ("ratio", "count") else f"{figure(measured.value)} {measured.unit}"
    )


def _by_slice(report: Report) -> tuple[dict[str, Intervals], list[Measurement]]:
    """Figures of slices by metric, as plots, and the figures of no slice that have no limit."""
    judged = [check.measurement for check in report.checks if check.measurement is not None]
    whole = {each.name: each for each in (*judged, *report.measurements)}
    bounds = {check.metric: check for check in report.checks}
    groups: dict[str, list[tuple[str, Measurement]]] = {}
    for each in whole.values():
        if (place := slice_of(each.name)) is not None:
            groups.setdefault(place[0], []).append((place[1], each))
    plots = {}
    for metric, members in groups.items():
        rows = [(label, each) for label, each in members]
        if metric in whole:
            rows.insert(0, ("all", whole[metric]))
        check = bounds.get(metric)
        plots[metric] = Intervals(
            f"{metric} by slice",
            "slice",
            members[0][1].unit,
            tuple(Interval(label, m.value, m.low, m.high, m.num_samples) for label, m in rows),
            members[0][1].confidence,
            None if check is None else check.bound,
            "" if check is None else check.side,
        )
    return plots, [each for each in report.measurements if slice_of(each.name) is None]


def _unlimited(measurements: Sequence[Measurement]) -> tuple[Exhibit, ...]:
    if not measurements:
        return ()
    columns = (
        Column("metric"),
        Column("measured", "figure"),
        Column("unit"),
        Column("interval"),
        Column("n", "count"),
        Column("detail"),
    )
    rows = tuple((m.name, m.value, m.unit, interval(m), m.num_samples, m.detail) for m in measurements)
    return (Table("Measured without a limit", columns, rows),)


def _environment(report: Report) -> tuple[Exhibit, ...]:
    context = report.context
    return (
        Facts(_pairs(context.machine), "Machine"),
        Facts(_pairs(context.versions), "Versions"),
        Facts(_pairs(context.engine), "Engine"),
    )


def _pairs(mapping: Mapping[str, str | bool | int | float | None]) -> tuple[tuple[str, str], ...]:
    said = {None: "not set", True: "yes", False: "no"}
    return tuple(
        (key, said[value] if value is None or isinstance(value, bool) else str(value)) for key, value in mapping.items()
    )


def _bound_to(report: Report) -> tuple[tuple[str, str], ...]:
    context = report.context
    return (
        ("recipe", f"{context.recipe_name} ({context.recipe_digest})"),
        ("artifact", context.artifact_digest),
        ("baseline", f"{context.base_origin} ({context.base_digest})"),
        *report.data.items(),
        *(
            (name, value)
            for name, value in (
                ("manifest", context.manifest_digest),
                ("engine and versions", context.engine_digest),
                ("measured", context.measured),
            )
            if value
        ),
    )


def _commands(commands: Sequence[str]) -> tuple[Exhibit, ...]:
    return (Code("\n".join(commands), "sh"),) if commands else ()
