"""Whether the gate refuses what is damaged, and passes what is not. Knows a gate as a function, and no recipes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantpipe.controls import CONTROLS
from quantpipe.controls.control import Control
from quantpipe.controls.damaged_copy import write_damaged
from quantpipe.errors import QuantpipeError
from quantpipe.evaluate.comparison import Comparison
from quantpipe.formats.artifact import Artifact
from quantpipe.gate.judge import Check, GateResult, Verdict
from quantpipe.gate.report import figure
from quantpipe.report import Reporter


@dataclass(frozen=True)
class Judged:
    """A verdict, and the items of the suite that it rests on, where there is one."""

    result: GateResult
    comparison: Comparison | None = None


# Judges a model folder. Raises QuantpipeError for one that it refuses to judge.
Judge = Callable[[Path], Judged]
AS_IT_IS, ITSELF = "as it is", "base model against itself"
MAX_KL_OF_ROUNDING = 1e-6  # of a stored baseline, whose log-probabilities are float32


@dataclass(frozen=True)
class ControlRow:
    """What became of one control on one artifact. ``outcome`` is one word, ``detail`` by what, or why not."""

    artifact: str
    control: str
    outcome: str
    detail: str
    is_well: bool


def run_controls(
    name: str, folder: Path, judge: Judge, scratch: Path, reporter: Reporter, controls: Mapping[str, Control] = CONTROLS
) -> list[ControlRow]:
    """Judge the artifact as it is, which must pass, and each damaged copy of it, which must fail.

    Where it does not pass as it is the rest is left out: that damaged copies fail would show nothing.
    """
    artifact = Artifact.open(folder)
    reporter.stage(f"{name}: {AS_IT_IS}")
    rows = [_sound(name, judge, folder)]
    if not rows[0].is_well:
        return rows
    for control, damage_of in controls.items():
        damage = damage_of(artifact)
        if isinstance(damage, str):
            rows.append(ControlRow(name, control, "none", damage, is_well=True))
            continue
        reporter.stage(f"{name}: {control}")
        copy = write_damaged(artifact, damage, scratch / re.sub(r"\W+", "-", control))
        rows.append(_damaged(name, control, judge, copy))
    return rows


def itself_row(judge: Judge, base: Path) -> ControlRow:
    """Judge the base model against itself: PASS, KL of zero, and no item flipped."""
    judged = judge(base)
    result, comparison = judged.result, judged.comparison
    measured = [c.measurement for c in result.checks if c.measurement] + list(result.informational)
    largest_kl = max((m.high for m in measured if m.name.startswith(("mean_kl", "p99_kl"))), default=0.0)
    most_kl = MAX_KL_OF_ROUNDING if any("_topk" in m.name for m in measured) else 0.0
    num_flips = 0 if comparison is None else len(comparison.lost) + len(comparison.gained)
    is_well = result.verdict is Verdict.PASS and largest_kl <= most_kl and num_flips == 0
    shown = "no suite" if comparison is None else f"{num_flips} items flipped"
    detail = f"KL {figure(largest_kl)}, {shown}"
    if result.verdict is not Verdict.PASS:
        detail += f"; {_why(result, Verdict.FAIL, Verdict.UNSURE)}"
    return ControlRow("base model", ITSELF, result.verdict, detail, is_well)


def _sound(name: str, judge: Judge, folder: Path) -> ControlRow:
    result = judge(folder).result
    if result.verdict is Verdict.PASS:
        shown = "; ".join(_shown(check) for check in result.checks)
        return ControlRow(name, AS_IT_IS, result.verdict, shown, is_well=True)
    detail = (
        f"the controls show nothing on an artifact that does not pass: {_why(result, Verdict.FAIL, Verdict.UNSURE)}"
    )
    return ControlRow(name, AS_IT_IS, result.verdict, detail, is_well=False)


def _damaged(name: str, control: str, judge: Judge, copy: Path) -> ControlRow:
    try:
        result = judge(copy).result
    except QuantpipeError as error:
        return ControlRow(name, control, "REFUSED", str(error), is_well=True)
    if result.verdict is Verdict.FAIL:
        return ControlRow(name, control, result.verdict, _why(result, Verdict.FAIL), is_well=True)
    if result.verdict is Verdict.UNSURE:
        detail = f"the gate did not refuse this: {_why(result, Verdict.UNSURE)}"
        return ControlRow(name, control, result.verdict, detail, is_well=False)
    detail = f"the gate would have released this: {'; '.join(_shown(check) for check in result.checks)}"
    return ControlRow(name, control, result.verdict, detail, is_well=False)


def _why(result: GateResult, *verdicts: Verdict) -> str:
    return "; ".join(_shown(check) for check in result.checks if check.verdict in verdicts)


def _shown(check: Check) -> str:
    if check.measurement is None:
        return f"{check.metric}: {check.reason}"
    said = f", {check.measurement.detail}" if check.measurement.unit == "count" else ""
    return f"{check.metric} {figure(check.measurement.value)} ({check.limit}){said}"


def summary(rows: Sequence[ControlRow]) -> str:
    """The rows as lines of text, and what they come to."""
    lines: list[str] = []
    for artifact in dict.fromkeys(row.artifact for row in rows):
        lines.append(artifact)
        own = [row for row in rows if row.artifact == artifact]
        lines += [f"  {row.outcome:8}{'' if row.is_well else '! '}{row.control}: {row.detail}" for row in own]
    num_wrong, num_asked = sum(not row.is_well for row in rows), sum(row.outcome != "none" for row in rows)
    lines.append(
        "Damaged copies have manifests that fit them: what is tested is the evaluation, not the digests that "
        "`quantpipe verify` compares."
    )
    lines.append(f"{num_wrong} of {num_asked} controls misbehave" if num_wrong else f"all {num_asked} controls behave")
    return "\n".join(lines)
