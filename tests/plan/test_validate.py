"""Prediction against a measured run: every figure is there, and memory is as it was counted."""

from pathlib import Path

import pytest
from planned import MIXTRAL, write_config

from quantpipe.errors import RecipeError
from quantpipe.plan.devices import GivenSpeeds
from quantpipe.plan.subject import read_subject
from quantpipe.plan.validate import Compared, render, validate

GIVEN = GivenSpeeds(1e10, 1e11)


def test_every_load_is_measured_and_memory_is_as_counted(tiny_llama: Path, tmp_path: Path) -> None:
    subject = read_subject(tiny_llama, (), None, tmp_path)
    rows = {row.name: row for row in validate(subject, tiny_llama, (1, 2), (8, 16), GIVEN, "cpu")}
    loads = [f"{figure} {load}" for load in ("1 x 8", "1 x 16", "2 x 8", "2 x 16") for figure in ("TTFT", "TPOT")]
    assert list(rows) == ["weights", "KV cache", "resident in all", *loads]
    assert rows["weights"].predicted == pytest.approx(rows["weights"].measured, rel=0.05)
    assert rows["KV cache"].predicted == pytest.approx(rows["KV cache"].measured)
    assert all(row.predicted > 0 and row.measured > 0 for row in rows.values())


def test_an_error_is_of_the_measurement() -> None:
    row = Compared("TPOT 1 x 8", "ms", 12.0, 10.0)
    assert row.error_percent == pytest.approx(20)
    assert render([row]).splitlines()[1].split() == ["TPOT", "1", "x", "8,", "ms", "12.0", "10.0", "+20", "%"]


def test_a_model_that_is_not_served_cannot_be_measured(tmp_path: Path) -> None:
    subject = read_subject(write_config(tmp_path, MIXTRAL), (), None, tmp_path)
    with pytest.raises(RecipeError, match=r"--validate: .* is not served"):
        validate(subject, tmp_path, (1,), (8,), GIVEN, "cpu")
