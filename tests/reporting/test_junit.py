"""Each check is a test case; what stops the release is a failure, what does not is skipped."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from reports import a_report, a_result

from quantpipe.gate.judge import Limit, Measurement, judge
from quantpipe.reporting.junit import render_junit
from quantpipe.reporting.report import Report


def cases(report: Report) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(render_junit(report))
    return {case.get("name", ""): case for case in root.iter("testcase")}


def test_pass_is_a_case_without_a_failure_and_unsure_is_a_failure() -> None:
    found = cases(a_report())
    assert found["mean_kl"].find("failure") is None
    failure = found["accuracy_loss_points"].find("failure")
    assert failure is not None
    assert failure.get("type") == "UNSURE"
    assert "4.01 points, interval 2.02 .. 6.03 (90 %), n 181, limit <= 5" in str(failure.get("message"))


def test_what_does_not_stop_the_release_is_skipped() -> None:
    report = a_report()
    warns = tuple(replace(check, is_blocking=False) for check in report.checks)
    root = ElementTree.fromstring(render_junit(replace(report, checks=warns)))
    assert (root.get("tests"), root.get("failures"), root.get("skipped")) == ("2", "0", "1")
    assert cases(replace(report, checks=warns))["accuracy_loss_points"].find("skipped") is not None


@pytest.mark.parametrize("kl", [0.09, float("nan")])
def test_fail_and_what_cannot_be_judged_are_failures(kl: float) -> None:
    measured = Measurement("mean_kl", kl, 0.08, 0.1, 0.9, 16, "nats")
    result = judge({"mean_kl": Limit(max=0.05), "perplexity_ratio": Limit(max=1.0)}, [measured])
    root = ElementTree.fromstring(render_junit(a_report(result)))
    assert (root.get("tests"), root.get("failures")) == ("2", "2")


def test_properties_say_what_it_is_bound_to_and_odd_characters_are_legal() -> None:
    report = a_report(a_result(), recipe_name="a\x00b & <c>")
    root = ElementTree.fromstring(render_junit(report))
    bound_to = {each.get("name"): each.get("value") for each in root.iter("property")}
    assert bound_to["artifact"] == "bb" * 32
    assert bound_to["suite"] == "dd" * 32
    assert [suite.get("name") for suite in root.iter("testsuite")] == ["gate of a b & <c>"]
