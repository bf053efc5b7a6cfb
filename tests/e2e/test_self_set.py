"""A set that the model writes itself: from the command line to blocks, and not written twice."""

import json
from pathlib import Path

import pytest

from quantpipe import cli

SET = """
version: 1
name: own
sources:
  - kind: self
    num_samples: 40
    max_tokens: 40
    openers: {en: ["What is "], code: ["def "]}
"""

RECIPE = """
version: 1
name: tiny
model: {model}
calibration: {{set: own, num_sequences: 6, sequence_length: 32}}
quantize: {{solver: gptq, scheme: {{name: w4a16, group_size: 64}}}}
engine: {{num_threads: 1, max_model_len: 256}}
bench: {{}}
gate: {{tpot_ratio_c8: {{max: 2}}}}
output: run
"""


@pytest.fixture
def project(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "set.yaml").write_text(SET)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tiny_llama))
    return tmp_path


def test_a_model_calibrates_on_what_it_wrote(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = ["calibrate", "build", "--recipe", str(project / "recipe.yaml"), "--quiet"]
    assert cli.run(build) == 0
    first = capsys.readouterr().out
    assert "own: 6 x 32 = 192 tokens" in first
    (path,) = (project / "run" / "self_text").iterdir()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["language"] for row in rows] == ["en", "code"] * 20
    written = path.stat().st_mtime_ns
    assert cli.run(build) == 0
    assert capsys.readouterr().out == first
    assert path.stat().st_mtime_ns == written


def test_without_a_model_nobody_can_write(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["calibrate", "inspect", str(project / "own")]) == 2
    assert "kind self is text that a model writes; give it with --model" in capsys.readouterr().err
