"""Which colour and form belong to which series."""

from collections.abc import Sequence

from quantpipe.reporting.plots.svg import box, text_px, words

HEIGHT = 22.0


def draw_legend(series: Sequence[str], start_px: float) -> tuple[list[str], float]:
    """The legend in one line from ``start_px`` on, and its height."""
    parts, x = [], start_px
    for index, name in enumerate(series):
        parts += [box(x, 4, 11, 11, f"bar s{index % 4}"), words(x + 16, 14, name, "label")]
        x += 34 + text_px(name)
    return parts, HEIGHT
