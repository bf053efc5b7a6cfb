"""A check: its interval drawn against its limit, the forbidden side shaded."""

import math

from quantpipe.gate.judge import Measurement
from quantpipe.gate.report import figure, interval
from quantpipe.reporting.plots.scale import Scale, scale_of, tick_text, ticks
from quantpipe.reporting.plots.svg import box, drawing, element, line, text_px, tooltip, words
from quantpipe.reporting.report import CheckRow

WIDTH, HEIGHT, EDGE = 440.0, 66.0, 14.0
_TOP, _MIDDLE, _AXIS = 18.0, 33.0, 48.0


def draw_check(check: CheckRow) -> str:
    """The picture, or nothing where no interval or no bound is known."""
    measured = check.measurement
    if measured is None or check.bound is None or not math.isfinite(measured.value):
        return ""
    values = (measured.value, measured.low, measured.high, check.bound)
    scale = scale_of(values, EDGE, WIDTH - EDGE, margin_frac=0.12)
    says = f"measured {figure(measured.value)}, interval {interval(measured)}, limit {check.limit}: {check.outcome}"
    return drawing(
        WIDTH,
        HEIGHT,
        check.metric,
        says,
        *_limit(check, check.bound, scale),
        *_axis(scale),
        *_interval(measured, scale, f"v-{check.verdict.lower()}"),
    )


def _limit(check: CheckRow, bound: float, scale: Scale) -> list[str]:
    at = scale.place(bound)
    left, right = (at, scale.end) if check.side == "max" else (scale.start, at)
    label = f"limit {check.limit}"
    anchor = "end" if at + text_px(label) > WIDTH - EDGE else "start"
    return [
        box(left, _TOP, right - left, _AXIS - _TOP, "forbidden"),
        line(at, _TOP - 5, at, _AXIS, "limit"),
        words(at + (-4 if anchor == "end" else 4), _TOP - 6, label, "limit-text", anchor),
    ]


def _axis(scale: Scale) -> list[str]:
    marks = [line(scale.start, _AXIS, scale.end, _AXIS, "axis")]
    for value in ticks(scale, 5):
        at = scale.place(value)
        marks += [line(at, _AXIS, at, _AXIS + 4, "axis"), words(at, _AXIS + 16, tick_text(value), "tick", "middle")]
    return marks


def _interval(measured: Measurement, scale: Scale, kind: str) -> list[str]:
    low, value, high = (scale.place(each) for each in (measured.low, measured.value, measured.high))
    says = f"{figure(measured.value)}, interval {interval(measured)}"
    whiskers = [
        line(place, _MIDDLE - 6, place, _MIDDLE + 6, f"whisker {kind}")
        for place, end in ((low, measured.low), (high, measured.high))
        if math.isfinite(end)
    ]
    return [
        element("g", {}, tooltip(says), box(low, _MIDDLE - 3, max(high - low, 1.0), 6, f"span {kind}"), *whiskers),
        element("circle", {"cx": value, "cy": _MIDDLE, "r": 5.0, "class": f"dot {kind}"}, tooltip(says)),
    ]
