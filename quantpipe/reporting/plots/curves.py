"""Lines over a common axis, with the intervals of points that have one."""

from quantpipe.reporting.exhibits import Curve, Curves, Point
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.plots.scale import Scale, scale_of, ticks
from quantpipe.reporting.plots.svg import drawing, element, fitted, line, text_px, tooltip, words

WIDTH, HEIGHT = 470.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 44.0, 38.0


def draw_curves(plot: Curves) -> str:
    """The axes, then a line for each curve."""
    points = [point for curve in plot.curves for point in curve.points]
    xs = sorted({point.x for point in points})
    if plot.is_log_x and xs:
        x_scale = Scale(xs[0] / 1.15, xs[-1] * 1.15, _LEFT, WIDTH - _RIGHT, is_log=True)
    else:
        x_scale = scale_of(xs, _LEFT, WIDTH - _RIGHT, margin_frac=0.06)
    ends = [end for point in points for end in (point.y, point.low, point.high) if end is not None]
    y_scale = scale_of(ends, HEIGHT - _BOTTOM, _TOP, plot.from_zero)
    parts = [*_axes(plot, xs, x_scale, y_scale), *_legend(plot)]
    for index, curve in enumerate(plot.curves):
        parts += _curve(plot, curve, index % 4, x_scale, y_scale)
    says = "; ".join(_says(plot, curve) for curve in plot.curves)
    return drawing(WIDTH, HEIGHT, plot.name, says, *parts)


def _axes(plot: Curves, xs: list[float], x_scale: Scale, y_scale: Scale) -> list[str]:
    parts, bottom = [], HEIGHT - _BOTTOM
    for value in ticks(y_scale, 5):
        y = y_scale.place(value)
        label = shown(value, "figure" if plot.form in ("one_decimal", "two_decimals") else plot.form)
        parts += [line(_LEFT, y, WIDTH - _RIGHT, y, "grid"), words(_LEFT - 6, y + 4, label, "tick", "end")]
    parts.append(line(_LEFT, bottom, WIDTH - _RIGHT, bottom, "axis"))
    places = [(x, plot.x_labels[int(x)] if plot.x_labels else shown(x, "figure")) for x in xs]
    if not plot.x_labels and not plot.is_log_x:
        places = [(x, shown(x, "figure")) for x in ticks(x_scale, 6)]
    taken = 0.0
    for x, label in places:
        at, width = x_scale.place(x), text_px(label)
        if at - width / 2 > taken:
            parts.append(words(at, bottom + 15, label, "tick", "middle"))
            taken = at + width / 2 + 4
    return [*parts, words((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, plot.x_name, "tick", "middle")]


def _legend(plot: Curves) -> list[str]:
    title = "" if plot.y_name == plot.name else plot.y_name  # said above the picture
    parts, x = [words(0, 12, title, "label strong")], _LEFT
    for index, curve in enumerate(plot.curves):
        name = fitted(curve.name, (WIDTH - _LEFT) / len(plot.curves) - 26)
        parts += [_marker(x + 5, 28, index % 4, ""), words(x + 14, 32, name, "label")]
        x += 32 + text_px(name)
    return parts


def _curve(plot: Curves, curve: Curve, index: int, x_scale: Scale, y_scale: Scale) -> list[str]:
    places = [(x_scale.place(point.x), y_scale.place(point.y)) for point in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [element("polyline", {"points": path, "class": f"curve s{index}"})]
    for (x, y), point in zip(places, curve.points, strict=True):
        if point.low is not None and point.high is not None:
            low, high = y_scale.place(point.low), y_scale.place(point.high)
            parts += [line(x, low, x, high, f"whisker s{index}")]
            parts += [line(x - 4, end, x + 4, end, f"whisker s{index}") for end in (low, high)]
        if point.label:
            parts.append(words(x - 8, y - 7, point.label, "tick", "end"))
        parts.append(_marker(x, y, index, f"{curve.name}, {_at(plot, point)}: {shown(point.y, plot.form)}"))
    return parts


def _marker(x: float, y: float, index: int, hint: str) -> str:
    """A form of its own for each line: colours alone do not tell them apart."""
    says, kind = ((tooltip(hint),) if hint else ()), f"dot s{index}"
    match index:
        case 0:
            return element("circle", {"cx": x, "cy": y, "r": 4.0, "class": kind}, *says)
        case 1:
            return element("rect", {"x": x - 3.6, "y": y - 3.6, "width": 7.2, "height": 7.2, "class": kind}, *says)
        case 2:
            corners = f"{x:.1f},{y - 5:.1f} {x - 4.6:.1f},{y + 3.6:.1f} {x + 4.6:.1f},{y + 3.6:.1f}"
            return element("polygon", {"points": corners, "class": kind}, *says)
    corners = f"{x:.1f},{y - 5:.1f} {x + 5:.1f},{y:.1f} {x:.1f},{y + 5:.1f} {x - 5:.1f},{y:.1f}"
    return element("polygon", {"points": corners, "class": kind}, *says)


def _at(plot: Curves, point: Point) -> str:
    return plot.x_labels[int(point.x)] if plot.x_labels else f"{plot.x_name} {shown(point.x, 'figure')}"


def _says(plot: Curves, curve: Curve) -> str:
    ends = [f"{_at(plot, point)} {shown(point.y, plot.form)}" for point in (curve.points[0], curve.points[-1])]
    return f"{curve.name} from {' to '.join(dict.fromkeys(ends))}"
