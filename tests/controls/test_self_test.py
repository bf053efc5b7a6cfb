"""What the self-test makes of a gate that is strict, lax, unsure or refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
from suite_items import flipped

from quantpipe.controls import CONTROLS
from quantpipe.controls.self_test import Judge, Judged, itself_row, run_controls, summary
from quantpipe.errors import DataError
from quantpipe.gate.judge import Measurement, judge
from quantpipe.gate.limits import Limit
from quantpipe.report import Reporter

ONE = {"wrong chat template": CONTROLS["wrong chat template"]}


def result(value: float, half: float = 0.0, name: str = "mean_kl") -> Judged:
    measurement = Measurement(name, value, value - half, value + half, 0.9, 20, "nats")
    return Judged(judge({name: Limit(max=0.05)}, [measurement]))


def judging(sound: Judged, damaged: Judged, artifact: Path) -> Judge:
    return lambda folder: sound if folder == artifact else damaged


@pytest.mark.parametrize(
    ("damaged", "outcome", "is_well", "detail"),
    [
        (result(0.5), "FAIL", True, "mean_kl 0.5 (<= 0.05)"),
        (result(0.01), "PASS", False, "the gate would have released this: mean_kl 0.01 (<= 0.05)"),
        (result(0.05, 0.01), "UNSURE", False, "the gate did not refuse this: mean_kl 0.05 (<= 0.05)"),
    ],
)
def test_only_a_damaged_copy_that_fails_is_well(
    damaged: Judged,
    outcome: str,
    is_well: bool,
    detail: str,
    tiny_artifacts: dict[str, Path],
    tmp_path: Path,
    quiet: Reporter,
) -> None:
    folder = tiny_artifacts["w8a8"]
    sound, row = run_controls("a", folder, judging(result(0.01), damaged, folder), tmp_path, quiet, ONE)
    assert sound.is_well
    assert (row.outcome, row.is_well, row.detail) == (outcome, is_well, detail)
    assert ("1 of 2 controls misbehave" in summary([sound, row])) is not is_well


def test_a_gate_that_refuses_to_judge_has_caught_it(
    tiny_artifacts: dict[str, Path], tmp_path: Path, quiet: Reporter
) -> None:
    folder = tiny_artifacts["w8a8"]

    def gate(judged: Path) -> Judged:
        if judged != folder:
            raise DataError("different prompt tokens")
        return result(0.01)

    row = run_controls("a", folder, gate, tmp_path, quiet, ONE)[1]
    assert (row.outcome, row.is_well, row.detail) == ("REFUSED", True, "different prompt tokens")


def test_controls_on_an_artifact_that_does_not_pass_show_nothing(
    tiny_artifacts: dict[str, Path], tmp_path: Path, quiet: Reporter
) -> None:
    folder = tiny_artifacts["w8a8"]
    [row] = run_controls("a", folder, judging(result(0.5), result(0.5), folder), tmp_path, quiet, ONE)
    assert not row.is_well
    assert row.detail.startswith("the controls show nothing on an artifact that does not pass: mean_kl 0.5")
    assert not list(tmp_path.iterdir())


def test_the_base_against_itself_must_pass_with_nothing_moved() -> None:
    itself = Path("base")
    assert itself_row(lambda _: result(0.0), itself).is_well
    assert not itself_row(lambda _: result(1e-9), itself).is_well  # within the limit, and yet not the same
    assert not itself_row(lambda _: result(0.5), itself).is_well
    assert itself_row(lambda _: result(1e-8, name="mean_kl_topk"), itself).is_well
    row = itself_row(lambda _: replace(result(0.0), comparison=flipped(24, 0)), itself)
    assert (row.is_well, row.detail) == (True, "KL 0, 0 items flipped")
    row = itself_row(lambda _: replace(result(0.0), comparison=flipped(24, 1, 1)), itself)
    assert (row.is_well, row.detail) == (False, "KL 0, 2 items flipped")
