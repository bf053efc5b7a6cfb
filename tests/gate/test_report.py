"""The terminal's table says what the verdict rests on, and odd text cannot break it."""

import io
import math
from datetime import date

import pytest
from rich.console import Console

from quantpipe.gate.judge import Measurement, judge, judge_limits
from quantpipe.gate.limits import GateLimit, Limit, Waiver
from quantpipe.gate.report import figure, render_table


def test_waived_and_warned_checks_are_told_in_the_table() -> None:
    waiver = Waiver(reason="fixed in 1.2", by="ann", until=date(2027, 1, 31))
    limits = [
        GateLimit(metric="mean_kl", at_most=0.01, waiver=waiver),
        GateLimit(metric="mean_kl", at_most=0.03, on_unsure="warn", slice={}),
    ]
    found = Measurement("mean_kl", 0.031, 0.028, 0.034, 0.9, 16, "nats")
    result = judge_limits(limits, lambda _entry, _confidence: found, correction="holm", today=date(2026, 12, 1))
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_table(result))
    assert isinstance(console.file, io.StringIO)
    assert "Gate: PASS with waivers and warnings" in console.file.getvalue()
    assert "waived by ann" in console.file.getvalue()


def test_the_terminal_table_shows_the_checks_and_does_not_read_text_as_markup() -> None:
    result = judge({"mean_kl": Limit(max=0.05), "[red]x": Limit(max=1.0)}, [])
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_table(result))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "Gate: FAIL" in text
    assert "[red]x" in text
    assert "not measured" in text
    assert "<= 0.05" in text


def test_the_terminal_table_of_long_figures_fits_eighty_columns() -> None:
    measurements = [
        Measurement("output_tok_s_ratio_c8", 1.2345678, 1.1234567, 1.3456789, 0.9, 3, "ratio"),
        Measurement("accuracy_loss_points", -10.123456, -12.345678, 14.123456, 0.9, 1234, "points"),
    ]
    limits = {"output_tok_s_ratio_c8": Limit(min=1.125), "accuracy_loss_points": Limit(max=5.0)}
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_table(judge(limits, measurements)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "output_tok_s_ratio_c8  >= 1.125" in text
    assert "-12.35 .. 14.12" in text
    assert "90 % interval" in text
    assert "roughly" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (0.03141592, "0.03142"), (123456.7, "123457"), (-2.5, "-2.5"), (math.inf, "+inf"), (math.nan, "nan")],
)
def test_figures_are_short(value: float, text: str) -> None:
    assert figure(value) == text
