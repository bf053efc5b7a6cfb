"""What a run writes about its calibration set, and when it is made again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantpipe.calibrate.coverage.coverage_plots import PLOT_NAMES
from quantpipe.calibrate.coverage.run_coverage import (
    JSON_NAME,
    MARKDOWN_NAME,
    coverage_fact,
    report_coverage,
    withdraw_coverage,
)
from quantpipe.calibration.calibration_set import CalibrationSet, Document, digest_blocks
from quantpipe.quantize.by_recipe import open_model
from quantpipe.report import Reporter

IDS = np.random.default_rng(0).integers(3, 60, (8, 16))
HELD_OUT = {"cards": [tuple(range(60, 76)), tuple(range(70, 86))]}
EVERY_NAME = {JSON_NAME, MARKDOWN_NAME, *PLOT_NAMES}


def built(token_ids: np.ndarray = IDS) -> CalibrationSet:
    documents = tuple(Document(f"rows.csv:{i}", "rows.csv", "cards", "en", 16, 16) for i in range(len(token_ids)))
    return CalibrationSet("tickets", token_ids, 8, (), digest_blocks(token_ids), documents=documents)


@pytest.fixture
def written(tmp_path: Path, tiny_model: Callable[..., Path], quiet: Reporter) -> Callable[..., dict[str, Any]]:
    """Reports into ``run`` and gives back coverage.json."""

    def write(
        calibration: CalibrationSet | None = None, with_model: bool = False, held_out: Any = HELD_OUT, **made_with: Any
    ) -> dict[str, Any]:
        model = open_model(tiny_model("llama")) if with_model else None
        report_coverage(tmp_path / "run", calibration or built(), 128, held_out, model, made_with, quiet)
        stored: dict[str, Any] = json.loads((tmp_path / "run" / JSON_NAME).read_text(encoding="utf-8"))
        return stored

    return write


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_text_gives_json_markdown_and_one_plot(written: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    stored = written()
    assert names(tmp_path / "run") == {JSON_NAME, MARKDOWN_NAME, "coverage-text.png"}
    assert stored["activations"] is None
    assert stored["text"]["domains"] == [{"name": "cards", "num_documents": 8, "num_tokens": 128}]
    assert stored["text"]["held_out"][0]["num_tokens"] == 32


def test_activations_come_with_their_plots_and_nothing_temporary_stays(
    written: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    stored = written(with_model=True)
    assert names(tmp_path / "run") == EVERY_NAME
    assert stored["activations"]["domains"] == ["cards"]
    assert len(stored["activations"]["inputs"]) == 8
    assert "## Activations" in (tmp_path / "run" / MARKDOWN_NAME).read_text(encoding="utf-8")


def test_activations_without_held_out_text_still_tell_of_saturation(
    written: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert written(with_model=True, held_out={})["activations"]["domains"] == []
    assert names(tmp_path / "run") == EVERY_NAME - {"coverage-beyond.png"}


def test_it_is_made_again_only_when_something_changed(written: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    first = written(with_model=True, base="a")
    plot = tmp_path / "run" / "coverage-text.png"
    plot.write_bytes(b"as it was")
    assert written(with_model=True, base="a") == first
    assert plot.read_bytes() == b"as it was"
    other_ids = IDS.copy()
    other_ids[0, 0] += 1
    keys = {first["key"]}
    for changed in (
        written(with_model=True, base="b"),
        written(built(other_ids), with_model=True, base="a"),
        written(with_model=True, base="a", held_out={"loans": HELD_OUT["cards"]}),
        written(replace(built(), documents=built().documents[:1]), with_model=True, base="a"),
        written(base="a"),
    ):
        assert changed["key"] not in keys
        keys.add(changed["key"])
    assert plot.read_bytes() != b"as it was"


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"key": 3}'])
def test_a_damaged_record_is_made_again(written: Callable[..., dict[str, Any]], tmp_path: Path, damage: str) -> None:
    first = written()
    (tmp_path / "run" / JSON_NAME).write_text(damage, encoding="utf-8")
    assert written() == first


def test_plots_of_activations_do_not_outlive_them(written: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    written(with_model=True)
    written()
    assert names(tmp_path / "run") == {JSON_NAME, MARKDOWN_NAME, "coverage-text.png"}
    withdraw_coverage(tmp_path / "run")
    assert names(tmp_path / "run") == set()
    withdraw_coverage(tmp_path / "nowhere")


def test_the_report_links_to_a_coverage_that_is_there(written: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    assert coverage_fact(tmp_path / "run") == ()
    written()
    assert coverage_fact(tmp_path / "run") == (("coverage", "see coverage.md"),)
