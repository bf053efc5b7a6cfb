"""How numbers are shown, in every file alike."""

import math

from quantpipe.gate.report import figure
from quantpipe.reporting.exhibits import Cell, Form

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def shown(cell: Cell, form: Form) -> str:
    """A cell as text: ``-`` where there is nothing, a number as its column's ``form`` says."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if not math.isfinite(cell) or form in ("text", "figure"):
        return figure(cell)
    match form:
        case "count":
            return f"{cell:,.0f}"
        case "percent":
            return f"{100 * cell:.3g} %"
        case "one_decimal":
            return f"{cell:,.1f}"
        case "two_decimals":
            return f"{cell:,.2f}"
        case "scientific":
            return f"{cell:.2e}"
    return num_bytes(cell)


def num_bytes(value: float) -> str:
    """Bytes in the largest unit of which there is at least one: ``1,536 bytes``, ``155.7 MiB``."""
    exponent = 0
    while abs(value) >= 1024 and exponent < len(UNITS) - 1:
        value, exponent = value / 1024, exponent + 1
    return f"{value:,.0f} {UNITS[0]}" if exponent == 0 else f"{value:,.1f} {UNITS[exponent]}"
