"""The ``doctor`` command, by itself and where only the runtime's libraries are installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Installed with the package, and absent where only its runtime is.
ABSENT = (
    "pydantic",
    "fastapi",
    "lm_eval",
    "transformers",
    "datasets",
    "uvicorn",
    "prometheus_client",
    "compressed_tensors",
)
BLOCK = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )


MODULE = BLOCK + "from quantpipe.doctor.__main__ import main; sys.exit(main())"
COMMAND = BLOCK + "from quantpipe.cli import main; main()"


def test_facts_are_a_line_each_without_other_libraries() -> None:
    done = run(MODULE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line[:4] in ("ok  ", "--  ", "!!  ") for line in lines)
    subjects = [line[4:].split(":")[0] for line in lines]
    assert subjects[:6] == ["quantpipe", "python", "torch", "numpy", "safetensors", "tokenizers"]
    assert {"triton", "cpu", "cpu kernels", "cuda"} <= set(subjects)


def test_command_line_has_it_too_without_other_libraries() -> None:
    done = run(COMMAND, "doctor")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(MODULE).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--gpu-check", "--only", "kernel"), 2, "doctor: --only: unknown part 'kernel'; did you mean 'kernels'?"),
        (("--gpu-check", "--skip", "x"), 2, "doctor: --skip: unknown part 'x' (known: ceilings, "),
        (("--gpu-check", "--only", "facts", "--skip", "facts"), 2, "doctor: --skip: no part is left to run"),
        (("--only", "kernels"), 2, "doctor: --only belongs to the GPU check; add --gpu-check"),
        (("--fresh",), 2, "doctor: --fresh belongs to the GPU check; add --gpu-check"),
        (("--gpu-cheque",), 2, "quantpipe.doctor: No such option"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(MODULE, *arguments, TRITON_INTERPRET="1")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@WITHOUT_GPU
@pytest.mark.parametrize("only", [(), ("--only", "kernels"), ("--only", "facts", "--only", "sweep")])
def test_gpu_check_without_a_gpu_is_refused_in_its_own_words(tmp_path: Path, only: tuple[str, ...]) -> None:
    done = run(MODULE, "--gpu-check", *only, "--output", str(tmp_path / "check.json"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("doctor: --gpu-check needs a CUDA GPU, and torch finds none; ")
    assert "engine.backend" not in done.stderr
    assert not (tmp_path / "check.json").exists()


@WITHOUT_GPU
def test_mistakes_in_options_come_before_the_missing_gpu(tmp_path: Path) -> None:
    assert run(MODULE, "--gpu-check", "--only", "kernel").stderr.startswith("doctor: --only: unknown part 'kernel'; ")
    done = run(MODULE, "--gpu-check", "--output", "nope/x.json")
    assert (done.returncode, done.stderr) == (
        3,
        "--output: nope: there is no such folder; make it, or give another --output\n",
    )


@WITHOUT_GPU
def test_facts_need_no_gpu(tmp_path: Path) -> None:
    done = run(MODULE, "--gpu-check", "--only", "facts", "--output", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "check.json").read_text())
    assert (record["identity"]["device"], record["parts"]["facts"]["state"]) == ("none", "passed")
    assert run(MODULE, "--only", "facts").stdout == run(MODULE).stdout


def test_interpreted_kernels_are_called_so() -> None:
    lines = run(MODULE, TRITON_INTERPRET="1").stdout.splitlines()
    assert any(
        line.startswith("--  triton kernels: TRITON_INTERPRET is set, so engine.backend 'triton'") for line in lines
    )
    assert not any("does not run here" in line for line in lines)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_module_explains_itself(option: str) -> None:
    done = run(MODULE, option)
    assert done.returncode == 0
    assert "-h, --help" in done.stdout


def test_a_damaged_part_is_told_and_run_again(tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    arguments = ("--gpu-check", "--output", str(output), "--only", "facts")
    run(MODULE, *arguments, TRITON_INTERPRET="1")
    record = json.loads(output.read_text())
    record["parts"]["facts"]["rows"] = 7
    output.write_text(json.dumps(record))
    done = run(MODULE, *arguments, TRITON_INTERPRET="1")
    assert done.returncode == 0
    assert done.stderr.startswith(f"{output}: part 'facts': rows: found a number, and a list is expected; ")
    assert json.loads(output.read_text())["parts"]["facts"]["rows"]


def test_parts_that_cannot_run_are_not_called_right(tmp_path: Path) -> None:
    done = run(MODULE, "--gpu-check", "--only", "sweep", "--output", str(tmp_path / "c.json"), TRITON_INTERPRET="1")
    assert done.returncode == 0
    assert "nothing was checked: written to" in done.stdout
    assert "all right" not in done.stdout


def test_check_is_written_part_by_part_and_goes_on_from_there(tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    arguments = ("--gpu-check", "--output", str(output), "--only", "facts", "--only", "rooflines")
    first = run(MODULE, *arguments, TRITON_INTERPRET="1")
    assert first.returncode == 0, first.stderr
    record = json.loads(output.read_text())
    assert record["identity"]["device"] == "interpreted on the CPU"
    assert {name: part["state"] for name, part in record["parts"].items()} == {"facts": "passed", "rooflines": "absent"}
    record["parts"]["facts"]["rows"] = [{"subject": "from before", "found": "x", "state": "ok"}]
    output.write_text(json.dumps(record))
    again = run(MODULE, *arguments, TRITON_INTERPRET="1")
    assert "from before" in again.stdout
    assert "from before" not in run(MODULE, *arguments, "--fresh", TRITON_INTERPRET="1").stdout
