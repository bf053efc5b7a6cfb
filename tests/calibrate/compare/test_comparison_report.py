import json

import pytest

from quantpipe.calibrate.compare.comparison_report import (
    Comparison,
    DomainText,
    MeasuredRun,
    comparison_record,
    render_markdown,
    render_text,
)
from quantpipe.evaluate.seed_spread import compare_seeds

KL = {
    "banking": {"generic": (0.20, 0.21, 0.19), "tickets": (0.10, 0.105, 0.095)},
    "code": {"generic": (0.30, 0.32, 0.31), "tickets": (0.31, 0.30, 0.33)},
}


@pytest.fixture
def comparison() -> Comparison:
    spreads, differences = compare_seeds(KL)
    runs = tuple(
        MeasuredRun(name, seed, "c" * 64, "a" * 64, tuple((domain, KL[domain][name][seed]) for domain in KL))
        for seed in range(3)
        for name in ("generic", "tickets")
    )
    texts = (DomainText("banking", "rows held out by tickets", 16, 256), DomainText("code", "code.txt", 8, 256))
    return Comparison("bot", "owner/model", "b" * 64, (0, 1, 2), texts, runs, spreads, differences)


def test_the_table_shows_mean_and_spread_of_every_set_on_every_domain(comparison: Comparison) -> None:
    lines = render_text(comparison).splitlines()
    assert lines[0].endswith("over seeds 0, 1, 2")
    assert [line.split() for line in lines[2:5]] == [
        ["domain", "generic", "tickets"],
        ["banking", "0.2", "+-", "0.01", "0.1", "+-", "0.005"],
        ["code", "0.31", "+-", "0.01", "0.3133", "+-", "0.015"],
    ]


def test_each_domain_says_whether_the_difference_exceeds_the_spread(comparison: Comparison) -> None:
    text = render_text(comparison)
    assert "banking: generic - tickets = 0.1 (95% interval " in text
    assert "): differs, tickets is closer to the base model\n" in text
    (code,) = [line for line in text.splitlines() if line.startswith("code: generic - tickets = -0.003333")]
    assert code.endswith("): not shown to differ")
    assert "Student's t interval of the difference, paired by seed, over 3 seeds" in text


def test_the_record_is_json_with_every_figure(comparison: Comparison) -> None:
    record = json.loads(json.dumps(comparison_record(comparison), allow_nan=False))
    assert record["runs"][1]["mean_kl"] == {"banking": 0.1, "code": 0.31}
    assert [each["verdict"] for each in record["differences"]] == ["differs", "not shown to differ"]
    assert record["spreads"][0]["values"] == [0.20, 0.21, 0.19]
    assert record["spreads"][0]["deviation"] == pytest.approx(0.01)


def test_the_markdown_lists_texts_and_runs(comparison: Comparison) -> None:
    text = render_markdown(comparison)
    assert "| banking | rows held out by tickets | 16 x 256 |" in text
    assert text.count("| aaaaaaaaaaaa |") == 6


def test_a_set_whose_seeds_give_one_figure_is_pointed_out() -> None:
    spreads, differences = compare_seeds({"code": {"a": (0.1, 0.1), "b": (0.1, 0.2)}})
    comparison = Comparison("x", "m", "b" * 64, (0, 1), (DomainText("code", "t", 2, 8),), (), spreads, differences)
    assert "code: a gave the same figure with every seed: give it more text" in render_text(comparison)
