"""The document in a real browser: plots are drawn, nothing is asked of the network, it prints, in light and dark."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import num_pixels, opened, started_browser
from playwright.sync_api import Browser
from reports import CONTEXT, a_report, a_result

from quantpipe.gate.judge import Limit, Measurement, Verdict, judge
from quantpipe.gate.report import BenchRow, ScoreRow
from quantpipe.reporting.exhibits import Bar, Bars, Code, Column, Curve, Curves, Intervals, Panels, Table
from quantpipe.reporting.html.document import render_html, section_html
from quantpipe.reporting.html.exhibits import MOST_ROWS_DRAWN, exhibit_html
from quantpipe.reporting.report import ReportSection, report_of
from quantpipe.reporting.sections.bench import bench_section
from quantpipe.reporting.sections.divergence import WindowKL, divergence_section
from quantpipe.reporting.sections.suite import FlipRow, suite_section

FIRST_RGB = {"light": (11, 98, 196), "dark": (108, 176, 255)}
GOOD_RGB = {"light": (20, 113, 58), "dark": (99, 201, 139)}
OPEN_RGB = {"light": (138, 83, 0), "dark": (240, 192, 90)}
A4_PX = (794, 1123)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from started_browser()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_html(a_report()), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_is_drawn_and_nothing_is_asked_of_the_network(browser: Browser, url: str, scheme: str) -> None:
    with opened(browser, url, scheme) as (page, complaints):
        plots = page.locator("svg.plot").all()
        assert len(plots) >= 18
        colours = (FIRST_RGB[scheme], GOOD_RGB[scheme], OPEN_RGB[scheme])
        for plot in plots:
            label = plot.get_attribute("aria-label") or ""
            assert num_pixels(plot.screenshot(), colours) > 30, f"{label} is empty in {scheme}"
        assert complaints == []


def test_the_verdict_comes_first_and_is_the_largest(browser: Browser, url: str) -> None:
    with opened(browser, url) as (page, _):
        verdict = page.locator("#verdict strong")
        assert "UNSURE" in (verdict.text_content() or "")
        size = "(each) => parseFloat(getComputedStyle(each).fontSize)"
        largest = page.evaluate(f"Math.max(...[...document.querySelectorAll('body *')].map({size}))")
        assert verdict.evaluate(size) == largest
        box = verdict.bounding_box()
        assert box is not None
        assert box["y"] < 200


def test_it_prints_on_several_pages_with_no_plot_wider_than_paper(browser: Browser, url: str) -> None:
    with opened(browser, url) as (page, _):
        pdf = page.pdf(prefer_css_page_size=True)
        assert len(re.findall(rb"/Type\s*/Page[^s]", pdf)) > 1
        page.set_viewport_size({"width": A4_PX[0] - 113, "height": 900})  # without the margins
        page.emulate_media(media="print")
        wide = "[...document.querySelectorAll('svg.plot, table, pre')].map((each) => each.getBoundingClientRect())"
        for box in page.evaluate(f"{wide}.map((box) => [box.right, box.height])"):
            assert box[0] <= A4_PX[0] - 113 + 1
        heights = page.evaluate(
            "[...document.querySelectorAll('svg.plot')].map((e) => e.getBoundingClientRect().height)"
        )
        assert max(heights) < A4_PX[1] - 121, "a plot that is longer than a page would be cut"
        assert page.evaluate("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"


def test_a_narrow_screen_needs_no_scrolling_sideways(browser: Browser, url: str) -> None:
    with opened(browser, url) as (page, _):
        page.set_viewport_size({"width": 420, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_plots_have_a_text_and_a_table(browser: Browser, url: str) -> None:
    with opened(browser, url) as (page, _):
        labels = [plot.get_attribute("aria-label") for plot in page.locator("svg.plot").all()]
        assert all(label and ": " in label for label in labels)
        assert "mean_kl: measured 0.0311, interval 0.0278 .. 0.0344 (90 %), limit <= 0.05: PASS" in labels
        figures = page.locator("figure").count()
        assert page.locator("figure details table").count() == figures
        page.locator("figure details summary").first.click()
        assert page.locator("figure details table").first.is_visible()


def test_script_that_gets_into_the_document_is_not_run(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_html(a_report()).replace("</body>", "<script>window.ran = 1</script></body>"))
    with opened(browser, path.as_uri()) as (page, complaints):
        assert page.evaluate("window.ran") is None
        assert any("Content Security Policy" in text for text in complaints)


def test_the_file_names_no_other_and_keeps_text_as_text() -> None:
    html = render_html(a_report())
    assert re.findall(r"(?:src|href)=\"(?!data:|#)", html) == []
    assert "url(" not in html and "@import" not in html and "style=" not in html
    assert "<script" not in html
    assert "<b>not bold</b>" not in html and "&lt;b&gt;not bold" in html
    assert "legal | &lt;v2&gt;" in html
    assert "default-src 'none'" in html and "unsafe" not in html


def test_what_is_not_measured_is_said_and_not_drawn() -> None:
    html = render_html(a_report(judge({"mean_kl": Limit(max=1.0)}, [])))
    assert "not measured" in html
    nan = Measurement("mean_kl", float("nan"), 0.0, 1.0, 0.9, 16, "nats")
    assert "nan" in render_html(a_report(judge({"mean_kl": Limit(max=1.0)}, [nan])))
    assert section_html(ReportSection("x", "X")).count("Not run.") == 1
    empty = (Bars("B", "l", ("a",), ()), Panels("P", "l", "p", ("a",), ()), Curves("C", "x", "y", ()),
             Intervals("I", "l", "", (), 0.9))  # fmt: skip
    for plot in empty:
        assert "Nothing was measured." in exhibit_html(plot)


@pytest.mark.parametrize(("verdict", "kl"), [(Verdict.PASS, 0.01), (Verdict.FAIL, 0.09), (Verdict.UNSURE, 0.05)])
def test_every_verdict_has_a_word_and_a_sign(verdict: Verdict, kl: float) -> None:
    measured = Measurement("mean_kl", kl, kl - 0.01, kl + 0.01, 0.9, 16, "nats")
    html = render_html(a_report(judge({"mean_kl": Limit(max=0.05)}, [measured])))
    sign = {Verdict.PASS: "✓", Verdict.FAIL: "✕", Verdict.UNSURE: "?"}[verdict]
    assert f'<span aria-hidden="true">{sign} </span>{verdict}</strong>' in html


def test_a_long_table_is_folded() -> None:
    table = Table("Long", (Column("n", "count"),), ((1,),), long=True)
    assert exhibit_html(table).startswith("<details><summary>Long</summary>")


def test_a_plot_of_very_many_rows_is_cut_to_what_fits_on_paper_and_its_table_is_not() -> None:
    bars = tuple(Bar(f"window {number}", (float(number),)) for number in range(MOST_ROWS_DRAWN + 1))
    html = exhibit_html(Bars("B", "window", ("KL",), bars))
    assert html.count("<rect") == MOST_ROWS_DRAWN
    assert html.count("<tr>") == MOST_ROWS_DRAWN + 2
    assert f"The first {MOST_ROWS_DRAWN} of {MOST_ROWS_DRAWN + 1} are drawn." in html


def test_names_that_would_be_markup_are_shown_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    evil = "</title></style><script>window.ran = 1</script>\u202e\"'|`\x07中文"
    nan = float("nan")
    sections = (
        suite_section((ScoreRow(evil, 1, 0, 0, 0, 0),), (FlipRow(evil, evil, evil, True, None, evil, {evil: evil}),)),
        divergence_section((), (WindowKL(evil, nan, nan),)),
        bench_section((BenchRow(evil, 1, 1, nan, 0.0, float("inf")),)),
        ReportSection(evil, evil, (Code(evil, evil), Curves(evil, evil, evil, (Curve(evil, ()),)))),
    )
    path = tmp_path / "report.html"
    path.write_text(render_html(report_of(a_result(), CONTEXT, (evil,), sections, {evil: evil}, evil, (evil,))))
    with opened(browser, path.as_uri()) as (page, complaints):
        assert page.evaluate("window.ran") is None
        assert page.locator("script").count() == 0
        assert page.locator("h2").last.text_content() == "How to reproduce"
        assert complaints == []
