"""Horizontal bars, grouped by label, each with its value."""

import math

from quantpipe.reporting.exhibits import Bars
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.plots.legend import draw_legend
from quantpipe.reporting.plots.scale import scale_of
from quantpipe.reporting.plots.svg import box, drawing, fitted, line, text_px, words

WIDTH, BAR_PX, GAP_PX, VALUE_PX = 720.0, 14.0, 7.0, 96.0
LEAST_LABEL_PX, MOST_LABEL_PX = 48.0, 240.0


def draw_bars(plot: Bars) -> str:
    """The groups from top to bottom, in their order."""
    label_px = min(max(LEAST_LABEL_PX, *(text_px(bar.label) for bar in plot.bars)) + 12, MOST_LABEL_PX)
    values = [value for bar in plot.bars for value in bar.values if value is not None]
    scale = scale_of(values, label_px, WIDTH - VALUE_PX, from_zero=True, margin_frac=0.0)
    zero, group_px = scale.place(0.0), BAR_PX * len(plot.series) + GAP_PX
    legend, y = draw_legend(plot.series, label_px) if len(plot.series) > 1 else ([], 0.0)
    top, parts = y, list(legend)
    for bar in plot.bars:
        parts.append(words(label_px - 10, y + group_px / 2 + 2, fitted(bar.label, label_px - 12), "label", "end"))
        for index, value in enumerate(bar.values):
            at = y + GAP_PX / 2 + BAR_PX * index
            text = shown(value, plot.form)
            if value is not None and math.isfinite(value):
                end = scale.place(value)
                hint = f"{bar.label}, {plot.series[index]}: {text} {plot.unit}".rstrip()
                parts.append(box(min(zero, end), at + 1, abs(end - zero), BAR_PX - 2, f"bar s{index % 4}", hint))
                parts.append(words(max(zero, end) + 5, at + BAR_PX - 3, text, "value"))
            else:
                parts.append(words(zero + 5, at + BAR_PX - 3, text, "value"))
        y += group_px
    parts.append(line(zero, top, zero, y, "axis"))
    largest = max(plot.bars, key=lambda bar: max((v for v in bar.values if v is not None), default=-math.inf))
    return drawing(WIDTH, y + 4, plot.name, f"{len(plot.bars)} bars, the longest is {largest.label}", *parts)
