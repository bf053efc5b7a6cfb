"""Windows that two models have read, as they are kept: enough to measure every figure again at another confidence.

Knows neither models nor logits. Shapes: T positions of a window that predict a token.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quantpipe.evaluate.intervals import FloatArray
from quantpipe.evaluate.window_rows import WindowRow

DOMAIN = "domain"


@dataclass(frozen=True, eq=False)
class Compared:
    """A window's means, its KL at each position, in nats, and the fields it can be sliced by, such as its domain."""

    row: WindowRow
    kl_T: FloatArray
    fields: Mapping[str, str]


def select(windows: Sequence[Compared], fields: Mapping[str, str]) -> list[Compared]:
    """Those that have all these fields."""
    return [each for each in windows if all(each.fields.get(name) == value for name, value in fields.items())]


def unknown_fields(fields_of_windows: Sequence[Mapping[str, str]], wanted: Mapping[str, str]) -> str | None:
    """Why no window can be meant: a field's value that none has, or values that none has together; None if one has."""
    for name, value in wanted.items():
        values = sorted({fields[name] for fields in fields_of_windows if name in fields})
        if value not in values:
            names = sorted({field for fields in fields_of_windows for field in fields})
            known = f"its values: {', '.join(values)}" if values else f"known fields: {', '.join(names) or 'none'}"
            return f"no window has {name} '{value}' ({known})"
    if not any(wanted.items() <= fields.items() for fields in fields_of_windows):
        return f"no window has {' and '.join(f'{name} {value!r}' for name, value in wanted.items())} together"
    return None


def window_record(window: Compared) -> dict[str, Any]:
    """As JSON data; the positions are little-endian float64 in base64, which keeps them exactly."""
    kl = base64.b64encode(window.kl_T.astype("<f8").tobytes()).decode()
    return {"fields": dict(window.fields), **asdict(window.row), "kl_f64": kl}


def window_of(record: Mapping[str, Any]) -> Compared:
    """The reverse. Raises ValueError, KeyError or TypeError for what ``window_record`` did not write."""
    fields, kl = record["fields"], record["kl_f64"]
    means = {name: value for name, value in record.items() if name not in ("fields", "kl_f64")}
    kl_T = np.frombuffer(base64.b64decode(kl, validate=True), dtype="<f8")
    row = WindowRow(**means)
    if len(kl_T) != row.num_positions:
        raise ValueError(f"{len(kl_T)} of the {row.num_positions} positions of a window")
    return Compared(row, kl_T, {str(name): str(value) for name, value in fields.items()})
