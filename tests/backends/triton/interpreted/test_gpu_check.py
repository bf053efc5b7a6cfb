"""The GPU check where kernels are interpreted: what is right is checked, and what is fast is said not to be."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantpipe.doctor.cases import INTERPRETER_DTYPES, cases_for
from quantpipe.doctor.parts import PARTS
from quantpipe.doctor.speed.ceilings import Ceilings, measure_ceilings
from quantpipe.doctor.speed.decode_step import step_rows
from quantpipe.doctor.speed.end_to_end import end_to_end_rows
from quantpipe.doctor.speed.random_model import EIGHT_BILLION, needed_bytes
from quantpipe.doctor.speed.rooflines import Shapes, roofline_rows
from quantpipe.doctor.speed.sweep import candidates, sweep_rows
from quantpipe.formats.scheme import w4a16, w8a8

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
SHAPES = Shapes(128, 128, 4, 2, 32, 200, (1, 3), (32,), (1, 2), chunk_len=8, dtype=torch.float32)


class OneRun:
    """Does the work once, so that what a GPU would time is at least run, and gives a time of its own."""

    def __init__(self) -> None:
        self.num_runs = 0

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        self.num_runs += 1
        return 2e-6


def run_check(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    output = folder / "check.json"
    command = [sys.executable, "-m", "quantpipe.doctor", "--gpu-check", "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, json.loads(output.read_text()) if output.exists() else {}


@pytest.mark.slow
def test_every_kernel_is_right_and_nothing_is_timed_without_a_gpu(tmp_path: Path) -> None:
    done, record = run_check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    parts = record["parts"]
    assert parts.keys() == PARTS.keys()
    assert {name for name, part in parts.items() if part["state"] == "passed"} == {"facts", "kernels"}
    timed = [part for name, part in parts.items() if name not in ("facts", "kernels")]
    assert all((part["state"], part["rows"]) == ("absent", []) for part in timed)
    assert done.stdout.count("not run: needs a GPU, and kernels are interpreted on the CPU here") == len(timed)
    rows = parts["kernels"]["rows"]
    assert len(rows) == len(cases_for(CPU))
    assert all(row["ok"] is True and row["error"] <= 1 for row in rows)


def test_every_kernel_is_checked_in_every_dtype() -> None:
    of_kernel: dict[str, set[torch.dtype]] = {}
    for case in cases_for(CPU):
        of_kernel.setdefault(case.kernel, set()).add(case.dtype)
    assert set(of_kernel) == {
        *("dense", "weight only", "int8", "norm", "norm to int8", "gate", "gate to int8", "most likely"),
        *("rope and KV write", "copy of blocks", "attention"),
    }
    assert all(dtypes == set(INTERPRETER_DTYPES) for dtypes in of_kernel.values())
    names = [case.name for case in cases_for(CPU)]
    assert len(set(names)) == len(names)


def test_rooflines_run_every_kernel() -> None:
    timer = OneRun()
    rows = list(roofline_rows(CPU, timer, SHAPES, Ceilings(1e12, 1e15, 2e15)))
    assert timer.num_runs == len(rows) > 20
    assert {str(row["kernel"]).split(" ")[0] for row in rows} == {"linear", "attention", "norm", "gate", "rope", "most"}
    assert all(row["us"] == 2.0 and 0 <= float(str(row["share"])) < 1 for row in rows)


def test_ceilings_are_bytes_and_operations_over_seconds() -> None:
    ceilings = measure_ceilings(CPU, OneRun(), copy_bytes=1000, matrix_size=32)
    assert ceilings == Ceilings(2000 / 2e-6, 2 * 32**3 / 2e-6, 2 * 32**3 / 2e-6)
    assert ceilings.least_seconds(1000) == pytest.approx(1e-6)
    assert Ceilings(1e9, 1e12, 2e12).least_seconds(1.0, 4e12) == 4.0
    assert Ceilings(1e9, 1e12, 2e12).least_seconds(1.0, 4e12, is_int8=True) == 2.0


def test_recorded_steps_are_compared_with_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"SCHEMES": {"w8a8": w8a8()}, "KV_DTYPES": ("auto",), "NUM_STEPS": 1, "PROMPT_LEN": 2, "_NUM_TIMED": 1}
    for name, value in few.items():
        monkeypatch.setattr(f"quantpipe.doctor.speed.decode_step.{name}", value)
    [row] = step_rows(CPU, EIGHT_BILLION | TINY, torch.float32)
    assert (row["weights"], row["kv"], row["equal tokens"], row["ok"]) == ("w8a8", "auto", "4 of 4", True)


def test_engines_of_random_weights_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantpipe.doctor.speed.end_to_end.NUM_NEW", 2)
    monkeypatch.setattr("quantpipe.doctor.speed.end_to_end.PROMPT_LEN", 3)
    monkeypatch.setattr("quantpipe.doctor.speed.end_to_end.SCHEMES", {"w8a8": w8a8()})
    monkeypatch.setattr("quantpipe.doctor.speed.end_to_end.KV_DTYPES", ("int8_per_token_head",))
    rows = list(end_to_end_rows(CPU, EIGHT_BILLION | TINY, batches=(1,), dtype=torch.float32))
    assert [(row["what"], row["kv"]) for row in rows] == [("quantpipe w8a8", "int8_per_token_head")]
    assert float(str(rows[0]["tokens/s"])) > 0


def test_sweep_prints_a_row_of_the_table_where_another_launch_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantpipe.doctor.speed.sweep.candidates", lambda entry: candidates(entry)[:2])

    class SecondIsFaster:
        def __init__(self) -> None:
            self.times = iter([2e-6, 1e-6] + [2e-6, 1.99e-6] * 50)

        def seconds(self, work: Callable[[], object]) -> float:
            work()
            return next(self.times)

    first, *others = sweep_rows(CPU, SecondIsFaster(), SHAPES)
    assert str(first["entry"]).startswith("(16, MatmulLaunch(16, ")
    assert (first["table us"], first["best us"]) == (2.0, 1.0)
    assert others
    assert all(row["entry"] == "as it is" for row in others)


def test_an_8b_shape_takes_what_its_weights_take() -> None:
    assert needed_bytes(EIGHT_BILLION, None).held_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert needed_bytes(EIGHT_BILLION, w4a16(128)).held_bytes == pytest.approx(5.7e9, rel=0.02)
