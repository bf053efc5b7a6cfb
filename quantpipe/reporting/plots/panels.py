"""Small plots of columns that share one scale, such as the errors of each kind of linear over a model's blocks."""

import math

from quantpipe.reporting.exhibits import Panel, Panels
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.plots.scale import Scale, scale_of, ticks
from quantpipe.reporting.plots.svg import box, drawing, line, text_px, words

WIDTH, HEIGHT = 316.0, 130.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 6.0, 20.0, 22.0


def draw_panels(plot: Panels) -> list[str]:
    """A picture for each panel."""
    values = [value for panel in plot.panels for series in panel.values for value in series]
    scale = scale_of(values, HEIGHT - _BOTTOM, _TOP, from_zero=True)
    return [_draw(plot, panel, scale) for panel in plot.panels]


def draw_key(plot: Panels) -> str:
    """Which colour belongs to which series: one line above all panels."""
    parts, x = list[str](), 0.0
    for index, name in enumerate(plot.series):
        parts += [box(x + 1, 3, 11, 11, _kind(plot, index)), words(x + 17, 13, name, "label")]
        x += 36 + text_px(name)
    return drawing(max(x, 1.0), 18, plot.name, f"colours of {', '.join(plot.series)}", *parts)


def _draw(plot: Panels, panel: Panel, scale: Scale) -> str:
    first, last = min(panel.positions, default=0), max(panel.positions, default=0)
    step_px = (WIDTH - _LEFT - _RIGHT) / (last - first + 1)
    parts = [words(_LEFT, 12, panel.name, "label strong")]
    for value in ticks(scale, 4):
        y = scale.place(value)
        parts += [
            line(_LEFT, y, WIDTH - _RIGHT, y, "grid"),
            words(_LEFT - 6, y + 4, shown(value, "figure"), "tick", "end"),
        ]
    for index, series in enumerate(panel.values):
        inset = (0.08 + 0.14 * index) * step_px
        for position, value in zip(panel.positions, series, strict=True):
            if math.isfinite(value):
                x, y = _LEFT + (position - first) * step_px + inset, scale.place(value)
                hint = f"{panel.name}, {plot.position_name} {position}, {plot.series[index]}: {shown(value, plot.form)}"
                zero = scale.place(0.0)
                parts.append(box(x, min(y, zero), step_px - 2 * inset, abs(zero - y), _kind(plot, index), hint))
    parts.append(line(_LEFT, scale.place(0.0), WIDTH - _RIGHT, scale.place(0.0), "axis"))
    middle = _LEFT + 0.5 * step_px
    parts += [
        words(middle, HEIGHT - 8, str(first), "tick", "middle"),
        words((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, plot.position_name, "tick", "middle"),
        words(WIDTH - _RIGHT - 0.5 * step_px, HEIGHT - 8, str(last), "tick", "middle"),
    ]
    largest = max((value for series in panel.values[-1:] for value in series), default=math.nan)
    says = f"{plot.series[-1]} over {len(panel.positions)} {plot.position_name}s, at most {shown(largest, plot.form)}"
    return drawing(WIDTH, HEIGHT, f"{plot.name}, {panel.name}", says, *parts)


def _kind(plot: Panels, index: int) -> str:
    """The last series is the one that counts; those before it are behind it, pale."""
    return "bar s0" if index == len(plot.series) - 1 else "bar s1"
