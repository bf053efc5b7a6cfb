"""An artifact is served only with a passing verdict on its very files; other folders need none."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from quantpipe import cli
from quantpipe.errors import EXIT_GATE_FAILED, UngatedError
from quantpipe.formats.artifact import Artifact
from quantpipe.formats.digests import MANIFEST_NAME, file_digest
from quantpipe.gate.judge import Measurement, judge_limits
from quantpipe.gate.limits import GateLimit, Waiver
from quantpipe.gate.record import RunContext, write_gate_json
from quantpipe.serve.gate_check import find_verdict, require_verdict

GOLDEN = Path(__file__).parents[1] / "golden"
KL = Measurement("mean_kl", 0.03, 0.02, 0.04, 0.9, 16, "nats")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "artifact"
    shutil.copytree(GOLDEN / "w8a8", folder)
    return folder


def give_verdict(artifact: Path, limit: GateLimit, today: date | None = None, place: Path | None = None) -> None:
    context = RunContext("r", "ab" * 32, Artifact.open(artifact).digest, "c", "d", {}, {}, {}, "2026-01-01")
    context = replace(context, manifest_digest=file_digest(artifact / MANIFEST_NAME))
    result = judge_limits([limit], lambda _entry, _confidence: KL, today=today)
    write_gate_json((place or artifact.parent) / "gate.json", result, context)


def test_a_passing_verdict_lets_it_be_served_without_a_word(artifact: Path) -> None:
    give_verdict(artifact, GateLimit(metric="mean_kl", at_most=0.05))
    assert require_verdict(artifact, False, True) is None
    assert require_verdict(artifact, False, False) is None
    (artifact.parent / "gate.json").unlink()
    give_verdict(artifact, GateLimit(metric="mean_kl", at_most=0.05), place=artifact.parent / "gate-artifact")
    assert require_verdict(artifact, False, True) is None


@pytest.mark.parametrize("is_verified", [False, True])
def test_no_verdict_or_another_than_pass_or_on_other_files_refuses(artifact: Path, is_verified: bool) -> None:
    with pytest.raises(UngatedError, match="no verdict on these files"):
        require_verdict(artifact, False, is_verified)
    give_verdict(artifact, GateLimit(metric="mean_kl", at_most=0.01))
    with pytest.raises(UngatedError, match=r"the verdict in .*gate\.json is FAIL; .* --allow-ungated"):
        require_verdict(artifact, False, is_verified)
    assert "served ungated: the verdict" in str(require_verdict(artifact, True, is_verified))
    give_verdict(artifact, GateLimit(metric="mean_kl", at_most=0.05))
    manifest = json.loads((artifact / MANIFEST_NAME).read_text())
    (artifact / MANIFEST_NAME).write_text(json.dumps(manifest | {"files": {}}))
    config = artifact / "config.json"
    config.write_text(config.read_text() + "\n")
    assert find_verdict(artifact, is_verified) is None
    (artifact.parent / "gate.json").write_text("{")
    with pytest.raises(UngatedError, match="no verdict on these files"):
        require_verdict(artifact, False, is_verified)


def test_a_file_changed_behind_its_manifest_is_noticed_where_nothing_else_will_verify(artifact: Path) -> None:
    give_verdict(artifact, GateLimit(metric="mean_kl", at_most=0.05))
    weights = artifact / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UngatedError):
        require_verdict(artifact, False, is_verified=False)
    assert require_verdict(artifact, False, is_verified=True) is None  # the engine's process compares every digest


def test_a_waiver_that_ended_after_the_verdict_lets_nothing_be_served_any_more(artifact: Path) -> None:
    today = datetime.now(UTC).date()
    for until, is_served in ((today, True), (today - timedelta(days=1), False)):
        waiver = Waiver(reason="known", by="ann", until=until)
        limit = GateLimit(metric="mean_kl", at_most=0.01, waiver=waiver)
        give_verdict(artifact, limit, today=today - timedelta(days=3))
        if is_served:
            assert require_verdict(artifact, False, True) is None
            continue
        with pytest.raises(UngatedError, match=f"the waiver of mean_kl in .* ended on {until}"):
            require_verdict(artifact, False, True)


def test_a_folder_of_somebody_else_is_served_with_a_note(tmp_path: Path) -> None:
    assert "not made by quantpipe" in str(require_verdict(tmp_path, False, True))
    assert require_verdict(tmp_path / "nowhere", False, True) is None  # said where it is opened


def test_the_command_refuses_with_one_line(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", str(artifact), "--port", "0"]) == EXIT_GATE_FAILED
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"{artifact}: no verdict on these files in gate.json beside it")
