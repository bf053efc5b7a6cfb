"""The Markdown report says what the verdict rests on, and odd text cannot break it."""

import pytest
from reports import CONTEXT, a_report

from quantpipe.gate.judge import Limit, Measurement, Verdict, judge
from quantpipe.reporting.exhibits import Code, Column, Table
from quantpipe.reporting.markdown import MOST_ROWS, render_markdown, section_markdown
from quantpipe.reporting.report import ReportSection, report_of


def test_the_report_opens_with_the_verdict_and_holds_every_figure() -> None:
    text = render_markdown(a_report())
    lines = text.splitlines()
    assert lines[0].endswith(": UNSURE")
    assert lines[2].startswith("**UNSURE**: 1 of 2 checks cannot be decided")
    for expected in (
        "| PASS | mean_kl | <= 0.05 | 0.0311 nats | 0.0278 .. 0.0344 (90 %) | 16 |",
        "items would decide",
        "| p99_kl | 0.4321 | nats | none | 4,096 |",
        "dequantized GGUF",
        "| code | 41 | 20 | 19 | 3 | 2 |",
        "| candidate | 8 | 40.1 | 5.20 | 1,219.8 | 24 |",
        "| reloaded == served | 2.00e-05 | 1.00e-03 | yes |",
        "| a == b | nan | 1.00e-03 | NO |",
        "**scheme**: w8a8",
        "| domain=legal | 0.0377 |",
        "| item-7 | t | code | lost | yes | c7 | language de |",
        "| j | 7.77 |",
        "aa" * 32,
        "bb" * 32,
        "cc" * 32,
        "**torch**: 2.13.0",
        "Some CPU",
        "quantpipe run recipes/legal.yaml",
    ):
        assert expected in text


def test_every_table_row_has_as_many_cells_as_its_heading() -> None:
    num_cells = None
    for line in render_markdown(a_report()).splitlines():
        if not line.startswith("|"):
            num_cells = None
            continue
        found = line.replace("\\|", "").count("|")
        num_cells = num_cells or found
        assert found == num_cells, line


def test_stages_that_did_not_run_are_said_not_to_have_run() -> None:
    text = render_markdown(report_of(judge({"mean_kl": Limit(max=1.0)}, []), CONTEXT))
    for heading in ("Suite", "Divergence", "Calibration coverage", "Bench", "Memory", "Parity"):
        assert f"## {heading}\n\nNot run." in text


@pytest.mark.parametrize("verdict", Verdict)
def test_the_first_sentence_names_the_verdict_and_its_consequence(verdict: Verdict) -> None:
    value = {Verdict.PASS: 0.01, Verdict.UNSURE: 0.05, Verdict.FAIL: 0.09}[verdict]
    measured = Measurement("mean_kl", value, value - 0.01, value + 0.01, 0.9, 16, "nats")
    text = render_markdown(report_of(judge({"mean_kl": Limit(max=0.05)}, [measured]), CONTEXT))
    assert f"**{verdict}**: " in text.splitlines()[2]


def test_long_tables_are_cut_and_say_where_the_rest_is() -> None:
    table = Table("Long", (Column("n", "count"),), tuple((n,) for n in range(MOST_ROWS + 1)))
    text = "\n".join(section_markdown(ReportSection("x", "X", (table,))))
    assert "1 more rows are in report.json." in text
    assert f"| {MOST_ROWS - 1} |" in text
    assert f"| {MOST_ROWS} |" not in text


def test_code_with_a_fence_in_it_stays_code() -> None:
    text = "\n".join(section_markdown(ReportSection("x", "X", (Code("a\n```\nb", "sh"),))))
    assert text.count("````") == 2
