"""Elements of SVG as text. Everything that comes from outside is escaped here."""

import math
import unicodedata
from collections.abc import Mapping
from html import escape

FONT_PX = 12.0
_NARROW_PX, _WIDE_PX = 7.2, 12.0

Attributes = Mapping[str, str | float]


def element(name: str, attributes: Attributes, *content: str) -> str:
    """An element around markup that is made already."""
    written = "".join(f' {key}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{written}>{''.join(content)}</{name}>" if content else f"<{name}{written}/>"


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Text at a place; ``kind`` are classes."""
    attributes: dict[str, str | float] = {"x": x, "y": y, "text-anchor": anchor, **({"class": kind} if kind else {})}
    return element("text", attributes, escape(text))


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return element("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": kind})


def box(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> str:
    """A rectangle; a mouse over it shows the ``hint``."""
    attributes: Attributes = {"x": x, "y": y, "width": max(width, 0.0), "height": max(height, 0.0), "class": kind}
    return element("rect", attributes, tooltip(hint)) if hint else element("rect", attributes)


def tooltip(hint: str) -> str:
    """What a mouse over the element around it shows."""
    return element("title", {}, escape(hint))


def drawing(width: float, height: float, name: str, says: str, *content: str) -> str:
    """A whole picture; ``says`` tells those who do not see it what it shows."""
    attributes: Attributes = {
        "viewBox": f"0 0 {_value(width)} {_value(height)}",
        "width": width,
        "height": height,
        "role": "img",
        "aria-label": f"{name}: {says}",
        "class": "plot",
    }
    return element("svg", attributes, *content)


def text_px(text: str) -> float:
    """About how wide a text is."""
    return sum(_WIDE_PX if unicodedata.east_asian_width(letter) in "WF" else _NARROW_PX for letter in text)


def fitted(text: str, width_px: float) -> str:
    """The text, or as much of its beginning as fits."""
    if text_px(text) <= width_px:
        return text
    while text and text_px(text) > width_px - 2 * _NARROW_PX:
        text = text[:-1]
    return f"{text}.."


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.1f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"
