"""Windows that two models have read, made up for tests of what is done with them."""

from collections.abc import Mapping

import numpy as np

from quantpipe.evaluate.fidelity.windows import Compared
from quantpipe.evaluate.window_rows import WindowRow


def window(row: WindowRow, fields: Mapping[str, str] | None = None) -> Compared:
    """One of these means, with a KL that rises from zero to twice its mean."""
    return Compared(row, np.linspace(0, 2 * row.mean_kl, row.num_positions), fields or {})


def windows(num: int, mean_kl: float = 0.02, fields: Mapping[str, str] | None = None) -> tuple[Compared, ...]:
    """Windows of 100 positions whose KL rises a little from one to the next."""
    rows = (WindowRow(3.0, 3.01 + n / 1000, mean_kl + n / 1000, 0.1, 0.9, 100) for n in range(num))
    return tuple(window(row, fields) for row in rows)
