import re

import pytest
from calibrate.coverage.made_coverage import activations, text_coverage

from quantpipe.calibrate.coverage.coverage_plots import PLOT_NAMES, TEXT_PLOT
from quantpipe.calibrate.coverage.coverage_report import activation_summary, render_markdown, text_summary


def rows_of(markdown: str, heading: str) -> list[list[str]]:
    """The rows of the table whose first heading is given."""
    lines = markdown.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def test_the_text_alone_is_told_in_tables_and_leads_to_its_plot() -> None:
    markdown = render_markdown(text_coverage(cards=[[1, 2, 500]]), None)
    assert markdown.startswith("# What tickets covers\n")
    assert rows_of(markdown, "domain") == [["cards", "40", "50 %", "1"], ["loans", "40", "50 %", "1"]]
    assert rows_of(markdown, "held out") == [["cards", "3", "66.67 %", "3", "66.67 %"]]
    assert f"]({TEXT_PLOT})" in markdown
    assert "Activations" not in markdown


def test_text_without_held_out_text_says_how_to_give_some() -> None:
    assert "give `evaluate.divergence`, or a `holdout` in the set" in render_markdown(text_coverage(), None)


def test_activations_are_told_by_domain_with_the_worst_input() -> None:
    coverage = activations()
    markdown = render_markdown(text_coverage(), coverage)
    # 999 calibration tokens: one more is the largest with a chance of 1 in 1000
    assert coverage.expected_frac(0) == pytest.approx(0.001)
    assert rows_of(markdown, "held out") == [
        ["cards", "1.05 %", "0.1 %", "2.1 %", "block 2 mlp.down_proj", "3.5"],
        ["loans", "1.55 %", "0.1 %", "2.6 %", "block 2 mlp.down_proj", "3.5"],
    ]
    worst = rows_of(markdown, "input of")
    assert worst[0] == ["block 2 mlp.down_proj", "loans", "2.6 %", "3.5", "999"]
    shares = [float(row[2].removesuffix(" %")) for row in worst]
    assert shares == sorted(shares, reverse=True)
    assert all(f"]({name})" in markdown for name in PLOT_NAMES)


def test_saturation_is_told_at_every_part_and_judged_by_the_last_half() -> None:
    markdown = render_markdown(text_coverage(), activations())
    assert [row[:2] for row in rows_of(markdown, "sequences")] == [
        ["1", "60 %"],
        ["2", "40 %"],
        ["4", "20 %"],
        ["8", "0 %"],
    ]
    assert "from 4 to 8 sequences the Hessian's diagonal changes by 20 % (median)" in markdown
    assert "6 of 6 inputs still move by more than 5 %" in markdown


def test_one_sequence_says_that_it_tells_nothing_of_saturation() -> None:
    markdown = render_markdown(text_coverage(), activations(num_points=1))
    assert "one sequence alone tells nothing" in markdown


def test_activations_without_held_out_text_tell_of_saturation_only() -> None:
    markdown = render_markdown(text_coverage(), activations(domains=()))
    assert "Saturation" in markdown
    assert "coverage-beyond.png" not in markdown


def test_experts_without_tokens_are_told_of() -> None:
    coverage = activations(unreached=("model.layers.0.mlp.experts.3.up_proj",))
    assert "1 linears of experts saw no calibration token, such as model.layers.0" in render_markdown(
        text_coverage(), coverage
    )


def test_names_cannot_break_out_of_their_table_or_line() -> None:
    name = "a | b\n## c"
    markdown = render_markdown(text_coverage(domains=(name,)), activations(domains=(name,)))
    assert rows_of(markdown, "domain")[0][0] == r"a \| b ## c"
    assert not any(line.startswith("## c") for line in markdown.splitlines())


def test_the_terminal_is_not_flooded_by_domains() -> None:
    names = tuple(f"topic {number}" for number in range(30))
    for lines in (
        list(activation_summary(activations(names))),
        list(text_summary(text_coverage(**{name: [[1]] for name in names}))),
    ):
        assert len(lines) <= 7
        assert "26 more held-out domains are not listed here" in lines


def test_the_terminal_gets_a_line_for_each_held_out_domain() -> None:
    lines = [*text_summary(text_coverage(cards=[[1, 2]])), *activation_summary(activations())]
    assert lines[0].startswith("vocabulary: 80 of 400 ids occur")
    assert [line.split(":")[0] for line in lines] == [
        "vocabulary", "truncated", "held-out cards", "held-out cards", "held-out loans", "saturation",
    ]  # fmt: skip
    assert all("\n" not in line for line in lines)
