"""``quantpipe calibrate compare`` from the command line, and again after it was interrupted."""

import json
import random
import shutil
import textwrap
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantpipe import cli

RECIPE = """
version: 1
name: tiny
model: {model}
calibration: {{set: code, num_sequences: 4, sequence_length: 32}}
quantize: {{solver: gptq, scheme: {{name: w3a16, group_size: 64}}}}
engine: {{num_threads: 1, max_model_len: 256}}
bench: {{}}
gate: {{tpot_ratio_c8: {{max: 2}}}}
output: run
"""


def write_set(folder: Path, texts: list[str], holdout: str) -> None:
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    source = "sources:\n  - path: rows.jsonl\n    domain: prose\n"
    (folder / "set.yaml").write_text(f"version: 1\nname: {folder.name}\n{holdout}\n{source}", encoding="utf-8")


@pytest.fixture
def one_layer(tmp_path: Path, tiny_llama: Path) -> Path:
    """The tiny trained model with its first layer only: a sixth of the work."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def project(tmp_path: Path, one_layer: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, a set of functions that holds rows out, and a set of letters in no order."""
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=one_layer))
    parts = Path(str(textwrap.__file__)).read_text(encoding="utf-8").split("\n\n")
    write_set(tmp_path / "code", [part for part in parts if len(part) > 40], "holdout: {frac: 0.3}")
    letters = random.Random(0)
    write_set(tmp_path / "noise", ["".join(letters.choices("qxzjkv !#", k=120)) for _ in range(60)], "")
    return tmp_path


@pytest.mark.slow
def test_sets_are_quantized_with_each_seed_and_a_second_run_makes_nothing_again(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = f"{project / 'code'},{project / 'noise'}"
    command = ["calibrate", "compare", str(project / "recipe.yaml"), "--sets", sets, "--seeds", "2"]
    command += ["--num-windows", "4", "--window-tokens", "48", "--quiet"]
    assert cli.run(command) == 0
    out = capsys.readouterr().out
    folder = project / "run" / "compare"
    record = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    assert [(run["set_name"], run["seed"]) for run in record["runs"]] == [
        ("code", 0),
        ("noise", 0),
        ("code", 1),
        ("noise", 1),
    ]
    assert len({run["artifact_digest"] for run in record["runs"]}) == 4
    mean = {spread["name"]: spread["mean"] for spread in record["spreads"]}
    assert 0 < mean["code"] < mean["noise"]
    assert "prose: code - noise = -" in out
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "artifact" in path.parts}
    (folder / "noise-1" / "fidelity.json").unlink()
    assert cli.run(command) == 0
    assert capsys.readouterr().out == out
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
