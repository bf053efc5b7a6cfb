"""What the calibration set covers: from the ``coverage.json`` of a run."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from quantpipe.reporting.exhibits import Bar, Bars, Curve, Curves, Exhibit, Facts, Point
from quantpipe.reporting.report import ReportSection

MOST_BARS = 12


def coverage_section(coverage: Mapping[str, Any] | None) -> ReportSection:
    """The coverage; None where the run has none."""
    if not coverage:
        return ReportSection("coverage", "Calibration coverage")
    text, activations = coverage["text"], coverage.get("activations")
    exhibits: list[Exhibit] = [Facts(_facts(text))]
    for name, key in (("domain", "domains"), ("language", "languages"), ("document length", "lengths")):
        shares = text[key][:MOST_BARS]
        bars = tuple(Bar(share["name"], (float(share["num_tokens"]),)) for share in shares)
        exhibits.append(Bars(f"Calibrated tokens by {name}", name, ("tokens",), bars, "tokens", "count"))
    if text["held_out"]:
        bars = tuple(
            Bar(seen["name"], (seen["num_tokens_seen"] / max(seen["num_tokens"], 1),)) for seen in text["held_out"]
        )
        exhibits.append(
            Bars("Held-out tokens whose id was calibrated on", "held out", ("share of tokens",), bars, form="percent")
        )
    if activations is not None:
        exhibits += _activations(activations)
    return ReportSection("coverage", "Calibration coverage", tuple(exhibits))


def _facts(text: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return (
        ("set", str(text["name"])),
        ("tokens", f"{text['num_tokens']:,} of {text['num_documents']:,} documents"),
        ("cut off", f"{text['num_tokens_cut']:,} tokens of {text['num_truncated']:,} documents"),
        (
            "vocabulary",
            f"{text['num_ids']:,} of {text['vocabulary_size']:,} ids ({100 * text['vocabulary_frac']:.3g} %)",
        ),
        ("more", "coverage.md beside this report"),
    )


def _activations(activations: Mapping[str, Any]) -> list[Exhibit]:
    inputs: Sequence[Mapping[str, Any]] = activations["inputs"]
    exhibits: list[Exhibit] = []
    if activations["domains"]:
        bars = tuple(Bar(name, (_beyond(inputs, i),)) for i, name in enumerate(activations["domains"]))
        note = "Values that linears read which are larger than every value of their channel in calibration."
        exhibits.append(
            Bars("Held-out values beyond the calibrated range", "held out", ("share",), bars, "", "percent", note)
        )
    if inputs:
        exhibits.append(_saturation(inputs))
    return exhibits


def _beyond(inputs: Sequence[Mapping[str, Any]], domain: int) -> float:
    parts = [each["held_out"][domain] for each in inputs]
    return float(sum(part["num_beyond"] for part in parts) / max(sum(part["num_values"] for part in parts), 1))


def _saturation(inputs: Sequence[Mapping[str, Any]]) -> Curves:
    """The median over all inputs of how far the statistics of the first sequences are from those of all."""
    curves = []
    for name, key in (("Hessian's diagonal", "hessian_change"), ("largest magnitudes", "absmax_change")):
        points = tuple(
            Point(float(first["num_sequences"]), median(each["curve"][i][key] for each in inputs))
            for i, first in enumerate(inputs[0]["curve"])
        )
        curves.append(Curve(name, points))
    return Curves("Saturation", "sequences", "distance from all", tuple(curves), "percent", is_log_x=True)
