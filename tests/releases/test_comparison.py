"""Side by side: what moved is said only where it may be compared, and a runtime's regression is called that."""

import json

import pytest
from reports import CONTEXT, a_report, a_result

from quantpipe.releases.comparability import group_of, obstacle
from quantpipe.releases.comparison import Comparison, compare_releases
from quantpipe.releases.comparison_files import comparison_html, comparison_json, comparison_markdown
from quantpipe.releases.opened import Judged
from quantpipe.reporting.report import Report, report_of

OTHER_MACHINE = {"cpu": "Another CPU", "cores": 64, "system": "Linux 6.1"}
NEW_TORCH = {"quantpipe": "0.1.0", "torch": "2.14.0"}


def compared(second: Report, first: Report | None = None) -> Comparison:
    return compare_releases((Judged("A", first or a_report()), Judged("B", second)))


def moved(comparison: Comparison) -> dict[str, str]:
    return {change.metric: change.moved for change in comparison.changes}


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0311, "no difference shown"), (0.036, "no difference shown"), (0.049, "worse"), (0.01, "better")],
)
def test_a_figure_moved_where_intervals_are_apart(kl: float, expected: str) -> None:
    comparison = compared(a_report(a_result(kl), artifact_digest="99" * 32, recipe_digest="88" * 32))
    assert moved(comparison)["mean_kl"] == expected
    assert any(note.startswith("Worse, B beside A: mean_kl") for note in comparison.notes) == (expected == "worse")


def test_the_same_artifact_with_another_version_that_is_worse_is_a_runtime_regression() -> None:
    comparison = compared(a_report(a_result(0.049), versions=NEW_TORCH))
    assert "the same artifact" in comparison.notes[0]
    assert "torch 2.13.0 -> 2.14.0" in comparison.notes[0]
    assert comparison.notes[1] == "Runtime regression, B beside A: mean_kl."
    fine = compared(a_report(versions=NEW_TORCH))
    assert fine.notes[1].startswith("No runtime regression is shown")


def test_other_engine_settings_are_named() -> None:
    comparison = compared(a_report(engine={"backend": "torch", "num_threads": None}))
    assert "engine.backend cpu -> torch" in comparison.notes[0]


def test_the_same_artifact_with_the_same_versions_differs_by_noise() -> None:
    assert "what differs is noise" in compared(a_report()).notes[0]


def test_bench_figures_of_another_machine_are_not_compared() -> None:
    text = comparison_markdown(compared(a_report(factor=3.0, machine=OTHER_MACHINE)))
    assert "B is not compared: another machine (Another CPU; Some CPU before)." in text
    speed = text.partition("## Speed of the candidates")[2].partition("\n## ")[0]
    assert "318.25" in speed
    assert "106.08" not in speed


def test_bench_figures_of_the_same_machine_are() -> None:
    speed = comparison_markdown(compared(a_report(factor=3.0))).partition("## Speed of the candidates")[2]
    assert "| output tok/s, 1 at a time | 318.25 | 106.08 |" in speed


def test_scores_of_another_suite_and_text_are_not_compared() -> None:
    other = report_of(a_result(0.049), CONTEXT, data={"suite": "00" * 32, "held-out text": "ee" * 32})
    comparison = compared(other)
    assert moved(comparison)["accuracy_loss_points"] == "not compared"
    assert moved(comparison)["mean_kl"] == "worse"
    assert "Not compared, B beside A: accuracy_loss_points: another suite." in comparison.notes


def test_what_is_not_known_is_not_compared() -> None:
    comparison = compared(report_of(a_result(0.049), CONTEXT))
    assert set(moved(comparison).values()) == {"not compared"}
    assert obstacle("evals", a_report(), report_of(a_result(), CONTEXT)) is not None


def test_another_base_model_makes_all_figures_incomparable() -> None:
    comparison = compared(a_report(base_digest="77" * 32))
    assert set(moved(comparison).values()) == {"not compared"}


def test_figures_that_one_lacks_are_said_to_be_missing() -> None:
    [change] = [
        each
        for each in compared(report_of(a_result(), CONTEXT), report_of(a_result(), CONTEXT)).changes
        if each.metric == "p99_kl"
    ]
    assert change.moved == "not compared"
    lacking = report_of(type(a_result())(a_result().verdict, a_result().checks), CONTEXT)
    assert moved(compared(lacking))["p99_kl"] == "missing"


def test_three_releases_stand_side_by_side() -> None:
    releases = tuple(Judged(name, a_report()) for name in "ABC")
    text = comparison_markdown(compare_releases(releases))
    assert "| verdict | UNSURE | UNSURE | UNSURE |" in text
    assert "| KV cache, per token | 864 bytes | 864 bytes | 864 bytes |" in text
    assert "Median error by kind of linear" in text
    for row in (line for line in text.splitlines() if line.startswith("| mean_kl ")):
        assert row.count("0.0311 (0.0278 .. 0.0344)") == 3


def test_json_has_the_same_figures_unrounded_and_html_draws_them() -> None:
    releases = (Judged("A", a_report()), Judged("B", a_report(a_result(0.049))))
    comparison = compare_releases(releases)
    record = json.loads(comparison_json(comparison, releases))
    assert record["schema"] == "quantpipe.comparison/1"
    assert record["releases"][1]["figures"]["mean_kl"]["value"] == 0.049
    assert {"metric": "mean_kl", "release": "B", "moved": "worse", "why": ""} in record["changes"]
    html = comparison_html(comparison)
    assert html.count("<svg") >= 4
    assert "default-src 'none'" in html


def test_figures_are_grouped_by_what_they_rest_on() -> None:
    groups = {
        name: group_of(name)
        for name in ("mean_kl[domain=x]", "accuracy_loss_points", "ttft_ratio_c8", "manifest_mismatches")
    }
    assert list(groups.values()) == ["fidelity", "evals", "bench", "counts"]
