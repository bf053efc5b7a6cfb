"""``quantpipe plan``: plain answers, one clear line for what cannot be, and no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planned import LLAMA2_70B, MIXTRAL, write_config

from quantpipe.cli import run

GOLDEN = Path(__file__).parent / "golden"
PROBE = """
import sys
from quantpipe.cli import run
code = run(sys.argv[1:])
print(sorted({"torch", "transformers", "safetensors"} & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("name", ["config", "mixture", "artifact", "recipe"])
def test_a_plan_imports_no_torch(tmp_path: Path, name: str) -> None:
    config = write_config(tmp_path, MIXTRAL if name == "mixture" else LLAMA2_70B)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nname: some\nmodel: .\noutput: out\nquantize: {solver: rtn, scheme: w4a16}\n", encoding="utf-8"
    )
    subject = {"artifact": GOLDEN / "w4a16", "recipe": recipe}.get(name, config)
    options = ["--gpu", "H100", "--context", "32"]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "plan", str(subject), *options], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "what pays most" in done.stdout
    assert ("quantizing, on a CPU" in done.stdout) == (name == "recipe")


def test_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, LLAMA2_70B)
    assert run(["plan", str(config), "--gpu", "H200", "--scheme", "w4a16 g128", "-c", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load"] == {
        "concurrency": 4,
        "context_tokens": 4096,
        "prompt_tokens": 3072,
        "output_tokens": 1024,
        "kv_dtype": "auto",
    }
    assert found["device"]["name"] == "H200" and found["memory"]["is_fitting"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--gpu", "H101"], 2, "--gpu: unknown 'H101'; did you mean 'H100'?"),
        (["--gpu", "new", "--flops", "1", "--memory", "80"], 2, "give --bandwidth as well"),
        (["--gpu", "L4", "--memory", "-1"], 2, "--memory: found -1 GB; give a number above 0"),
        (["--gpu", "L4", "--concurrency", "-1"], 2, "'--concurrency'"),
        (["--gpu", "L4", "--context", "5000"], 2, "--context: 5,000 exceeds the model's own limit of 4,096 tokens"),
        (["--gpu", "L4", "--slo", "fast"], 2, "--slo: unknown 'fast'"),
        (["--gpu", "L4", "--validate"], 2, "--validate: takes a model folder"),
        (["--gpu", "L4", "--set", "name=x"], 2, "--set: only a recipe has values to replace"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, message: str
) -> None:
    assert run(["plan", str(write_config(tmp_path, LLAMA2_70B)), *options]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(tmp_path / "absent")]) == 3
    assert "no such file or folder" in capsys.readouterr().err
