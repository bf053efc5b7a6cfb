"""The checks as JUnit XML, for the systems that run builds: a test case each.

FAIL and UNSURE are failures where they stop the release. They are skipped where a waiver, or a gate that only warns,
lets them be.
"""

from xml.etree import ElementTree

from quantpipe.gate.judge import Verdict
from quantpipe.reporting.contents import checks_table
from quantpipe.reporting.exhibits import Cell
from quantpipe.reporting.numbers import shown
from quantpipe.reporting.report import CheckRow, Report


def render_junit(report: Report) -> str:
    """One suite, named after the recipe; its properties say what the verdict is bound to."""
    context, kinds = report.context, [_outcome(check) for check in report.checks]
    counts = {
        "tests": str(len(kinds)),
        "failures": str(kinds.count("failure")),
        "errors": "0",
        "skipped": str(kinds.count("skipped")),
    }
    root = ElementTree.Element("testsuites", counts)
    name = f"gate of {context.recipe_name}"
    suite = ElementTree.SubElement(root, "testsuite", {"name": _legal(name), **counts, "timestamp": context.date[:19]})
    properties = ElementTree.SubElement(suite, "properties")
    bound_to = {
        "verdict": report.title,
        "recipe": context.recipe_digest,
        "artifact": context.artifact_digest,
        "baseline": context.base_digest,
        **report.data,
    }
    for key, value in bound_to.items():
        ElementTree.SubElement(properties, "property", {"name": _legal(key), "value": _legal(value)})
    for check, row in zip(report.checks, checks_table(report).rows, strict=True):
        _add(suite, check, row, context.recipe_name)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _outcome(check: CheckRow) -> str:
    if check.verdict is Verdict.PASS:
        return "passed"
    return "failure" if check.is_blocking else "skipped"


def _add(suite: ElementTree.Element, check: CheckRow, row: tuple[Cell, ...], recipe: str) -> None:
    attributes = {"classname": _legal(f"gate.{recipe}"), "name": _legal(check.metric), "time": "0"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    _, _, limit, measured, interval, num_samples, why = (shown(cell, "count") for cell in row)
    says = _legal(f"{check.metric}: {measured}, interval {interval}, n {num_samples}, limit {limit}: {why}")
    outcome = _outcome(check)
    if outcome == "skipped":
        ElementTree.SubElement(case, "skipped", {"message": says})
    elif outcome == "failure":
        ElementTree.SubElement(case, "failure", {"message": says, "type": check.outcome}).text = says
    else:
        ElementTree.SubElement(case, "system-out").text = says


def _legal(text: str) -> str:
    """Text without the control characters that XML cannot hold."""
    return "".join(letter if letter >= " " or letter in "\t\n" else " " for letter in text)
