"""A number has one look for each form."""

import math

import pytest

from quantpipe.reporting.exhibits import Cell, Form
from quantpipe.reporting.numbers import shown


@pytest.mark.parametrize(
    ("cell", "form", "text"),
    [
        (None, "figure", "-"),
        ("word", "count", "word"),
        (0.031112, "figure", "0.03111"),
        (1234, "count", "1,234"),
        (0.25, "percent", "25 %"),
        (1234.56, "one_decimal", "1,234.6"),
        (0.00012, "scientific", "1.20e-04"),
        (512, "bytes", "512 bytes"),
        (98_765_432, "bytes", "94.2 MiB"),
        (math.inf, "percent", "+inf"),
        (math.nan, "bytes", "nan"),
    ],
)
def test_cells_as_text(cell: Cell, form: Form, text: str) -> None:
    assert shown(cell, form) == text
