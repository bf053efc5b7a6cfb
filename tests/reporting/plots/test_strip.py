"""A check's interval stands on the right side of its limit, whose forbidden side is shaded."""

import re
from xml.etree import ElementTree

import pytest

from quantpipe.gate.judge import Limit, Measurement, judge
from quantpipe.reporting.plots.strip import draw_check
from quantpipe.reporting.report import check_row


def drawn(limit: Limit, value: float, low: float, high: float) -> dict[str, ElementTree.Element]:
    metric = "mean_kl" if limit.max is not None else "top1_agreement"
    unit = "nats" if limit.max is not None else "fraction"
    [check] = judge({metric: limit}, [Measurement(metric, value, low, high, 0.9, 16, unit)]).checks
    root = ElementTree.fromstring(draw_check(check_row(check)))
    return {str(each.get("class")).split(" ")[0]: each for each in root.iter() if each.get("class")}


def edges(box: ElementTree.Element) -> tuple[float, float]:
    start = float(box.get("x", "nan"))
    return start, start + float(box.get("width", "nan"))


def test_an_upper_limit_forbids_what_lies_to_its_right() -> None:
    parts = drawn(Limit(max=0.05), 0.03, 0.02, 0.04)
    assert edges(parts["span"])[1] < edges(parts["forbidden"])[0]
    assert "v-pass" in str(parts["span"].get("class"))


def test_a_lower_limit_forbids_what_lies_to_its_left() -> None:
    parts = drawn(Limit(min=0.9), 0.95, 0.93, 0.97)
    assert edges(parts["forbidden"])[1] < edges(parts["span"])[0]


def test_an_interval_that_straddles_the_limit_is_drawn_across_it() -> None:
    parts = drawn(Limit(max=0.05), 0.05, 0.04, 0.07)
    limit_px = float(parts["limit"].get("x1", "nan"))
    low_px, high_px = edges(parts["span"])
    assert low_px < limit_px < high_px
    assert "v-unsure" in str(parts["span"].get("class"))


def test_an_open_interval_reaches_the_edges_without_ends() -> None:
    parts = drawn(Limit(max=0.05), 0.03, float("-inf"), float("inf"))
    assert "whisker" not in parts
    low_px, high_px = edges(parts["span"])
    assert high_px - low_px > 400


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_is_no_picture(value: float) -> None:
    measured = Measurement("mean_kl", value, 0.0, 1.0, 0.9, 16, "nats")
    [check] = judge({"mean_kl": Limit(max=0.05)}, [measured]).checks
    assert draw_check(check_row(check)) == ""


def test_the_picture_says_in_words_what_it_shows() -> None:
    [check] = judge({"mean_kl": Limit(max=0.05)}, [Measurement("mean_kl", 0.03, 0.02, 0.04, 0.9, 16, "nats")]).checks
    label = re.search(r'aria-label="([^"]*)"', draw_check(check_row(check)))
    assert label is not None
    assert label[1] == "mean_kl: measured 0.03, interval 0.02 .. 0.04 (90 %), limit &lt;= 0.05: PASS"
