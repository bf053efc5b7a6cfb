"""Releases over time: a row for each, a line for each recipe, bench figures of unlike machines apart."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browsing import num_pixels, opened, started_browser
from playwright.sync_api import Browser
from reports import a_report, a_result

from quantpipe.gate.judge import GateResult, Measurement
from quantpipe.releases.archive import Release, add_release, read_index
from quantpipe.releases.trend import trend_html, trend_markdown, trend_plots
from quantpipe.reporting.exhibits import Curves
from quantpipe.reporting.writing import write_report


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from started_browser()


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Release, ...]:
    for number in range(4):
        plain = a_result(0.02 + number / 100)
        timed = Measurement("tpot_ratio_c1", 0.5 + number / 10, 0.45, 0.95, 0.9, 3, "ratio")
        result = GateResult(plain.verdict, plain.checks, (*plain.informational, timed))
        machine = {"cpu": "Old" if number < 2 else "New", "cores": 2}
        name = "legal" if number % 2 else "support"
        report = a_report(result, date=f"2025-01-0{number + 1}T03:04:05+00:00", machine=machine, recipe_name=name)
        write_report(tmp_path / "run", report)
        add_release(tmp_path / "archive", report, tmp_path / "run")
    return read_index(tmp_path / "archive")[0]


def test_the_table_has_a_row_for_each_release_oldest_first(releases: tuple[Release, ...]) -> None:
    lines = trend_markdown(releases).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| 2025-01-0{day}T03:04" for day in (1, 2, 3, 4)]
    assert "0.05 (0.0467 .. 0.0533)" in lines[-1]


def test_each_recipe_has_a_line_and_bench_figures_one_for_each_machine(releases: tuple[Release, ...]) -> None:
    plots = {each.name: each for each in trend_plots(releases) if isinstance(each, Curves)}
    lines = {curve.name: [point.y for point in curve.points] for curve in plots["mean_kl"].curves}
    assert lines == {"support": [0.02, 0.04], "legal": [0.03, 0.05]}
    timed = {curve.name: len(curve.points) for curve in plots["tpot_ratio_c1"].curves}
    assert timed == {"support (1)": 1, "legal (1)": 1, "support (2)": 1, "legal (2)": 1}
    assert not any("[" in name for name in plots)


def test_scores_of_another_suite_begin_another_line(releases: tuple[Release, ...]) -> None:
    *before, last = releases
    changed = (*before, replace(last, data=dict(last.data) | {"suite": "00" * 32}))
    plots = {each.name: each for each in trend_plots(changed) if isinstance(each, Curves)}
    assert [curve.name for curve in plots["accuracy_loss_points"].curves] == ["support", "legal (1)", "legal (2)"]
    assert [curve.name for curve in plots["mean_kl"].curves] == ["support", "legal"]


def test_the_page_draws_lines_and_asks_for_nothing(
    releases: tuple[Release, ...], tmp_path: Path, browser: Browser
) -> None:
    path = tmp_path / "trend.html"
    path.write_text(trend_html(releases, ("a line was cut",)), encoding="utf-8")
    with opened(browser, path.as_uri()) as (page, complaints):
        plots = page.locator("svg.plot").all()
        assert len(plots) == len(trend_plots(releases))
        assert all(num_pixels(plot.screenshot(), ((11, 98, 196), (194, 87, 12))) > 100 for plot in plots)
        assert "a line was cut" in page.content()
        assert complaints == []
