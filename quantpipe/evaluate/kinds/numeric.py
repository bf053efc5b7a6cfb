"""``numeric``: a number in the answer is the target's, within a tolerance. Reads ``1,234.5``, ``-3e4`` and units."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from quantpipe.calibration.definition.mapping import Text
from quantpipe.evaluate.kinds.kind import Item, Kind, Response, Scored, TextKeys, quoted, text_of, written

Tolerance = Annotated[float, Field(ge=0)]
Factor = Annotated[float, Field(gt=0)]
_DIGITS = {
    ".": r"\d{1,3}(?:[,'\u2019_\u00a0\u202f ]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+",
    ",": r"\d{1,3}(?:[.'\u2019_\u00a0\u202f ]\d{3})+(?:,\d+)?|\d+(?:,\d+)?|,\d+",
}
_MINUS = "-\u2212"  # and the typographic one


class NumericKeys(TextKeys):
    """A task of the kind `numeric`; the target is a number, or a text with one."""

    kind: Literal["numeric"]
    """`numeric`."""
    abs_tol: Tolerance = 0.0
    """How far the answer may be from the target."""
    rel_tol: Tolerance = 0.0
    """The same as a share of the target; the larger of the two counts."""
    take: Literal["first", "last"] = "first"
    """Which number of an answer counts."""
    decimal: Literal[".", ","] = "."
    """The sign before decimals; the other one, spaces, `'` and `_` may group thousands."""
    units: dict[Text, Factor] = Field(default_factory=dict)
    """Unit behind a number -> what it is multiplied by, in answers and targets: `{kg: 1000, g: 1}`. Other words behind
    a number do not count. Absent: none."""


@dataclass(frozen=True)
class NumericScorer:
    """Compares numbers; the prediction is the answer's, in the base unit."""

    keys: NumericKeys
    pattern: re.Pattern[str]

    def check(self, item: Item) -> None:
        self._target(item)

    def score(self, item: Item, response: Response) -> Scored:
        found = self.numbers(written(response))
        if not found:
            return Scored(0.0, "")
        value, target = found[0 if self.keys.take == "first" else -1], self._target(item)
        tolerance = max(self.keys.abs_tol, self.keys.rel_tol * abs(target))
        is_right = math.isclose(value, target, rel_tol=1e-12, abs_tol=tolerance)  # 0.1 * 3 is 0.3
        return Scored(float(is_right), f"{value:.12g}")

    def numbers(self, text: str) -> list[float]:
        """Every number in a text, in its base unit."""
        return [value for match in self.pattern.finditer(text) if math.isfinite(value := self._value(match))]

    def _value(self, match: re.Match[str]) -> float:
        digits = re.sub(r"['\u2019_\u00a0\u202f ]", "", match["digits"])
        digits = digits.replace(",", "") if self.keys.decimal == "." else digits.replace(".", "").replace(",", ".")
        value = float(f"{digits}{match['power'] or ''}") * self.keys.units.get(match["unit"] or "", 1.0)
        return -value if match["sign"] in tuple(_MINUS) else value

    def _target(self, item: Item) -> float:
        if isinstance(item.target, (int, float)) and not isinstance(item.target, bool):
            value = float(item.target)
        else:
            found = self.numbers(text := text_of(item.target))
            if len(found) != 1:
                raise ValueError(f"the target {quoted(text)} has {len(found)} numbers in it, not one")
            value = found[0]
        if not math.isfinite(value):
            raise ValueError(f"the target {value} is no finite number")
        return value


def _open(keys: NumericKeys, folder: Path, place: Callable[[str], str]) -> NumericScorer:
    longest_first = sorted(keys.units, key=len, reverse=True)
    units = "|".join(re.escape(unit) + (r"\b" if unit[-1].isalnum() else "") for unit in longest_first)
    unit = rf"(?:[ \u00a0]?(?P<unit>{units}))?" if units else "(?P<unit>)"
    number = rf"(?<![\w.,])(?P<digits>{_DIGITS[keys.decimal]})(?P<power>[eE][+-]?\d{{1,3}})?"
    pattern = rf"(?P<sign>(?<![\w.,])[{_MINUS}])?{number}{unit}"
    return NumericScorer(keys, re.compile(pattern))


KIND = Kind(NumericKeys, "text", "a number in the answer is the target's, within a tolerance", _open)
