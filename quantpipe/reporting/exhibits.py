"""What a section of a report shows, as plain data: tables, bars, curves, intervals, text. Knows no file format.

Numbers stand here unrounded; ``form`` says how every renderer shows them, so that all show the same.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid")
Form = Literal["text", "count", "figure", "percent", "one_decimal", "two_decimals", "scientific", "bytes"]
Cell = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A heading, and how the numbers below it are shown."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    form: Form = "text"


@dataclass(frozen=True)
class Table:
    """Rows under columns. One that is ``long`` is folded on a screen and left out on paper."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    long: bool = False
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Facts:
    """Names and what they are, in order."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    facts: tuple[tuple[str, str], ...]
    name: str = ""
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True)
class Text:
    """Sentences, each a paragraph, or an item of a list where ``bullets``."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    lines: tuple[str, ...]
    bullets: bool = False
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Code:
    """Text that is shown as it is: commands, a recipe."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    text: str
    language: str
    name: str = ""
    kind: Literal["code"] = "code"


@dataclass(frozen=True)
class Bar:
    """One label and a value of each series; None where there is none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    label: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, grouped by label. ``label_name`` is what the labels are."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    label_name: str
    series: tuple[str, ...]
    bars: tuple[Bar, ...]
    unit: str = ""
    form: Form = "figure"
    note: str = ""
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True)
class Panel:
    """One of many small plots: ``values[i]`` belong to series i, at ``positions``."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    positions: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Panels:
    """Small plots of columns over a numbered axis, such as a model's blocks; all share one scale."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    panel_name: str
    position_name: str
    series: tuple[str, ...]
    panels: tuple[Panel, ...]
    unit: str = ""
    form: Form = "figure"
    note: str = ""
    kind: Literal["panels"] = "panels"


@dataclass(frozen=True)
class Point:
    """A value at x, with its interval where it has one."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True)
class Curve:
    """Points in order of x, joined by a line."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Curves:
    """Lines over a common axis, which is that of logarithms where ``is_log_x``. ``x_labels`` name whole x from 0 on."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    x_name: str
    y_name: str
    curves: tuple[Curve, ...]
    form: Form = "figure"
    is_log_x: bool = False
    from_zero: bool = True
    x_labels: tuple[str, ...] = ()
    note: str = ""
    kind: Literal["curves"] = "curves"


@dataclass(frozen=True)
class Interval:
    """A value and its two-sided interval; an end that is not finite is open."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    label: str
    value: float
    low: float
    high: float
    num_samples: int


@dataclass(frozen=True)
class Intervals:
    """Values with their intervals over one axis, against ``bound`` where there is a limit: ``side`` max or min."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    label_name: str
    unit: str
    rows: tuple[Interval, ...]
    confidence: float
    bound: float | None = None
    side: Literal["max", "min", ""] = ""
    note: str = ""
    form: Form = "figure"
    kind: Literal["intervals"] = "intervals"


Plot = Bars | Panels | Curves | Intervals
Exhibit = Annotated[Table | Facts | Text | Code | Bars | Panels | Curves | Intervals, Field(discriminator="kind")]
