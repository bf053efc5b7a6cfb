"""Several intervals over one axis: a row each, the limit across all of them."""

import math

from quantpipe.reporting.exhibits import Interval, Intervals
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.plots.scale import Scale, scale_of, ticks
from quantpipe.reporting.plots.svg import box, drawing, element, fitted, line, text_px, tooltip, words

WIDTH, ROW_PX, TOP, BOTTOM = 720.0, 22.0, 22.0, 26.0
LEAST_LABEL_PX, MOST_LABEL_PX = 48.0, 240.0


def draw_intervals(plot: Intervals) -> str:
    """The rows from top to bottom, in their order."""
    label_px = min(max(LEAST_LABEL_PX, *(text_px(row.label) for row in plot.rows)) + 12, MOST_LABEL_PX)
    ends = [end for row in plot.rows for end in (row.value, row.low, row.high)]
    bound = [] if plot.bound is None else [plot.bound]
    scale = scale_of([*ends, *bound], label_px, WIDTH - 190)
    bottom = TOP + ROW_PX * len(plot.rows)
    parts = _axis(plot, scale, bottom)
    for number, row in enumerate(plot.rows):
        parts += _row(plot, row, scale, TOP + ROW_PX * (number + 0.5), label_px)
    worst = max(plot.rows, key=lambda row: row.value) if plot.rows else None
    says = f"{len(plot.rows)} intervals" + (f", the largest value at {worst.label}" if worst is not None else "")
    return drawing(WIDTH, bottom + BOTTOM, plot.name, says, *parts)


def _axis(plot: Intervals, scale: Scale, bottom: float) -> list[str]:
    parts = []
    for value in ticks(scale, 6):
        at = scale.place(value)
        parts += [line(at, TOP, at, bottom, "grid"), words(at, bottom + 16, shown(value, plot.form), "tick", "middle")]
    parts.append(line(scale.start, bottom, scale.end, bottom, "axis"))
    if plot.bound is not None:
        at = scale.place(plot.bound)
        left, right = (at, scale.end) if plot.side == "max" else (scale.start, at)
        parts += [
            box(left, TOP, right - left, bottom - TOP, "forbidden"),
            line(at, TOP - 4, at, bottom, "limit"),
            words(at, TOP - 8, f"limit {shown(plot.bound, plot.form)}", "limit-text", "middle"),
        ]
    unit = f"{plot.unit}" if plot.unit else ""
    return [*parts, words(WIDTH, bottom + 16, unit, "tick", "end")]


def _row(plot: Intervals, row: Interval, scale: Scale, y: float, label_px: float) -> list[str]:
    low, value, high = (scale.place(each) for each in (row.low, row.value, row.high))
    has_interval = math.isfinite(row.low) and math.isfinite(row.high)
    ends = f"{shown(row.low, plot.form)} .. {shown(row.high, plot.form)}" if has_interval else "no interval"
    says = f"{row.label}: {shown(row.value, plot.form)}, {ends}, n {row.num_samples:,}"
    whiskers = [line(low, y - 5, low, y + 5, "whisker s0"), line(high, y - 5, high, y + 5, "whisker s0")]
    return [
        words(label_px - 10, y + 4, fitted(row.label, label_px - 12), "label", "end"),
        element("g", {}, tooltip(says), line(low, y, high, y, "whisker s0"), *(whiskers if has_interval else [])),
        element("circle", {"cx": value, "cy": y, "r": 4.5, "class": "dot s0"}, tooltip(says)),
        words(WIDTH, y + 4, f"{shown(row.value, plot.form)} ({ends})", "value", "end"),
    ]
