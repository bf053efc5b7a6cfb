"""The table and the Markdown report say what the verdict rests on, and odd text cannot break them."""

import io
import math
from dataclasses import replace
from datetime import date

import pytest
from rich.console import Console

from quantpipe.gate.judge import GateResult, Measurement, Verdict, judge, judge_limits
from quantpipe.gate.limits import GateLimit, Limit, Waiver
from quantpipe.gate.record import RunContext
from quantpipe.gate.report import (
    BenchRow,
    FlipRow,
    ParityRow,
    ReportSections,
    ScoreRow,
    figure,
    render_markdown,
    render_table,
)

CONTEXT = RunContext(
    recipe_name="legal | v2",
    recipe_digest="recipe-digest",
    artifact_digest="artifact-digest",
    base_digest="base-digest",
    base_origin="model.gguf",
    engine={"backend": "cpu"},
    versions={"torch": "2.13.0"},
    machine={"cpu": "Some CPU", "cores": 2},
    date="2025-01-02T03:04:05+00:00",
)
FULL = ReportSections(
    context=CONTEXT,
    notes=("the full-precision baseline is a dequantized GGUF",),
    scores=(ScoreRow("code", 40, 20, 19, 3, 2),),
    bench=(BenchRow("baseline", 8, 24, 0.0123, 0.0045, 321.5),),
    parity=(ParityRow("reloaded == served", 2e-5, 1e-3), ParityRow("fake == reloaded", math.nan, 1e-3)),
    quantization=(("scheme", "w8a8"), ("solver", "rtn")),
    commands=("quantpipe run recipes/legal.yaml",),
)


def a_result() -> GateResult:
    measurements = [
        Measurement("mean_kl", 0.031, 0.028, 0.034, 0.9, 16, "nats"),
        Measurement("accuracy_loss_points", 4.0, 2.0, 6.0, 0.9, 180, "points"),
        Measurement("p99_kl", 0.4, -math.inf, math.inf, 0.9, 4096, "nats", "worst | window"),
    ]
    return judge({"mean_kl": Limit(max=0.05), "accuracy_loss_points": Limit(max=5.0)}, measurements)


def test_the_report_opens_with_the_verdict_and_holds_every_figure() -> None:
    text = render_markdown(a_result(), FULL)
    lines = text.splitlines()
    assert lines[0].endswith(": UNSURE")
    assert lines[2].startswith("**UNSURE**: 1 of 2 checks cannot be decided")
    for expected in (
        "| PASS | mean_kl | <= 0.05 | 0.031 nats | 0.028 .. 0.034 (90 %) | 16 |",
        "roughly 720 items would decide",
        "p99_kl",
        "dequantized GGUF",
        "| code | 40 | 20 | 19 | 3 | 2 |",
        "| baseline | 8 | 12.3 | 4.50 | 321.5 | 24 |",
        "| reloaded == served | 2.00e-05 | 1.00e-03 | yes |",
        "| fake == reloaded | nan | 1.00e-03 | NO |",
        "**scheme**: w8a8",
        "recipe-digest",
        "artifact-digest",
        "base-digest",
        "torch 2.13.0",
        "Some CPU",
        "quantpipe run recipes/legal.yaml",
    ):
        assert expected in text


def test_waived_and_warned_checks_are_told_in_the_first_sentence() -> None:
    waiver = Waiver(reason="fixed in 1.2", by="ann", until=date(2027, 1, 31))
    limits = [
        GateLimit(metric="mean_kl", at_most=0.01, waiver=waiver),
        GateLimit(metric="mean_kl", at_most=0.03, on_unsure="warn", slice={}),
    ]
    found = Measurement("mean_kl", 0.031, 0.028, 0.034, 0.9, 16, "nats")
    result = judge_limits(limits, lambda _entry, _confidence: found, correction="holm", today=date(2026, 12, 1))
    text = render_markdown(result, FULL)
    assert text.splitlines()[0].endswith(": PASS with waivers and warnings")
    assert text.splitlines()[2].startswith(
        "**PASS with waivers and warnings**: 0 of 2 checks pass; the candidate may be released. `mean_kl` is FAIL, the"
        " whole interval is outside the limit; waived by ann until 2027-01-31: fixed in 1.2. `mean_kl` is UNSURE"
    )
    assert "| FAIL (waived) | mean_kl |" in text and "| UNSURE (warns) | mean_kl |" in text
    assert "widened by Holm's method" in text
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(render_table(result))
    assert isinstance(console.file, io.StringIO)
    assert "Gate: PASS with waivers and warnings" in console.file.getvalue()
    assert "waived by ann" in console.file.getvalue()


def test_flips_are_listed_by_cluster() -> None:
    flips = tuple(FlipRow("code", f"c{n}", (f"i{n}",), (), n % 2) for n in range(45))
    text = render_markdown(a_result(), replace(FULL, flips=flips))
    assert "| code | c1 | i1 |  | 1 |" in text
    assert "5 more clusters have flips." in text


def test_every_table_row_has_as_many_cells_as_its_heading() -> None:
    num_cells = None
    for line in render_markdown(a_result(), FULL).splitlines():
        if not line.startswith("|"):
            num_cells = None
            continue
        found = line.replace("\\|", "").count("|")
        num_cells = num_cells or found
        assert found == num_cells, line


def test_stages_that_did_not_run_are_said_not_to_have_run() -> None:
    text = render_markdown(a_result(), ReportSections(context=CONTEXT))
    for heading in ("## Suite", "## Bench", "## Parity"):
        assert f"{heading}\n\nNot run." in text
    assert "The base model is released as it is." in text


@pytest.mark.parametrize("verdict", Verdict)
def test_the_first_sentence_names_the_verdict_and_its_consequence(verdict: Verdict) -> None:
    value = {Verdict.PASS: 0.01, Verdict.UNSURE: 0.05, Verdict.FAIL: 0.09}[verdict]
    result = judge(
        {"mean_kl": Limit(max=0.05)}, [Measurement("mean_kl", value, value - 0.01, value + 0.01, 0.9, 16, "nats")]
    )
    assert f"**{verdict}**: " in render_markdown(result, FULL).splitlines()[2]


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
