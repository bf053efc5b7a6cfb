"""``quantpipe bench`` on a tiny model: tables that can be read, and every part of a step in its place."""

from pathlib import Path

import pytest

from quantpipe.backends.cpu.native.structures import TIMED_PARTS
from quantpipe.bench.profile import COLUMNS
from quantpipe.cli import run
from quantpipe.engine.step_times import StepTimes


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_bench_prints_times_and_the_division_of_a_step(
    backend: str, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--backend", backend, "-c", "1", "-c", "3", "--prompt-tokens", "8", "--new-tokens", "5", "--profile"]
    assert run(["bench", str(tiny_llama), *options]) == 0
    times, division = capsys.readouterr().out.split("\n\n")
    assert [line.split(" | ")[0] for line in times.splitlines()[2:]] == ["| 1", "| 3"]
    rows = [line.split(" | ")[:2] for line in division.splitlines()[2:]]
    assert rows == [["| read prompts", "1"], ["| read prompts", "3"], ["| decode", "1"], ["| decode", "3"]]


def test_bench_refuses_what_is_no_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(tmp_path / "absent")]) == 3
    assert "no such folder" in capsys.readouterr().err


def test_bench_takes_settings_of_the_engine(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-c", "2", "--prompt-tokens", "8", "--new-tokens", "3"]
    settings = ["max_num_seqs=1", "block_size=8", "num_kv_blocks=9"]
    given = [part for setting in settings for part in ("--engine", setting)]
    assert run(["bench", str(tiny_llama), *options, *given]) == 0
    assert "| 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("blok_size=8", "--engine blok_size: unknown setting; did you mean 'block_size'?"),
        ("num_threads=1", "--engine: num_threads has an option of its own, --num-threads"),
        ("num_kv_blocks=1", "--engine num_kv_blocks: 1 blocks of 16 tokens do not hold one sequence"),
        ("max_model_len=9999999", "--engine max_model_len: 9,999,999 exceeds the model's own limit"),
    ],
)
def test_bench_names_a_setting_that_cannot_be_as_it_was_given(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    assert run(["bench", str(tiny_llama), "-c", "1", "--engine", setting]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(message)
    assert shown.count("\n") == 1


def test_every_part_that_is_timed_has_a_column() -> None:
    told = StepTimes().by_part(dict.fromkeys(TIMED_PARTS, 0.0))
    assert sorted(told) == sorted(part for parts in COLUMNS.values() for part in parts)
