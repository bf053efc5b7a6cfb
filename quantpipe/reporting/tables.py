"""The table behind each plot: the same numbers, for readers who do not see it and for files without pictures."""

from functools import singledispatch

from quantpipe.reporting.exhibits import Bars, Cell, Column, Curves, Intervals, Panels, Plot, Table


def table_behind(plot: Plot) -> Table:
    """The numbers of a plot as rows."""
    return _table(plot)


@singledispatch
def _table(plot: object) -> Table:
    raise TypeError(f"{type(plot).__name__} is no plot")


@_table.register
def _(plot: Bars) -> Table:
    columns = (Column(plot.label_name), *(Column(_with_unit(each, plot.unit), plot.form) for each in plot.series))
    return Table(plot.name, columns, tuple((bar.label, *bar.values) for bar in plot.bars), plot.note)


@_table.register
def _(plot: Panels) -> Table:
    series = (Column(_with_unit(each, plot.unit), plot.form) for each in plot.series)
    columns = (Column(plot.panel_name), Column(plot.position_name, "count"), *series)
    rows: list[tuple[Cell, ...]] = [
        (panel.name, position, *values)
        for panel in plot.panels
        for position, *values in zip(panel.positions, *panel.values, strict=True)
    ]
    return Table(plot.name, columns, tuple(rows), plot.note, long=len(rows) > 60)


@_table.register
def _(plot: Curves) -> Table:
    has_interval = any(point.low is not None for curve in plot.curves for point in curve.points)
    ends = (Column("low", plot.form), Column("high", plot.form)) if has_interval else ()
    x_column = Column(plot.x_name, "text" if plot.x_labels else "figure")
    rows: list[tuple[Cell, ...]] = []
    for curve in plot.curves:
        for point in curve.points:
            x: Cell = plot.x_labels[int(point.x)] if plot.x_labels else point.x
            rows.append((curve.name, x, point.y, *((point.low, point.high) if has_interval else ())))
    columns = (Column("line"), x_column, Column(plot.y_name, plot.form), *ends)
    return Table(plot.name, columns, tuple(rows), plot.note)


@_table.register
def _(plot: Intervals) -> Table:
    value = _with_unit("measured", plot.unit)
    columns = (
        Column(plot.label_name),
        Column(value, plot.form),
        Column(f"low ({100 * plot.confidence:g} %)", plot.form),
        Column("high", plot.form),
        Column("n", "count"),
    )
    rows = tuple((each.label, each.value, each.low, each.high, each.num_samples) for each in plot.rows)
    return Table(plot.name, columns, rows, plot.note)


def _with_unit(name: str, unit: str) -> str:
    return f"{name}, {unit}" if unit and unit != "ratio" else name
