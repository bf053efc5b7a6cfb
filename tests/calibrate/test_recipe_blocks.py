"""The blocks that a recipe asks for: built or read, compared with what is evaluated, told about and on record."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantpipe.calibrate.recipe_blocks import CACHE_FOLDER, budget_of, calibrate, write_manifest
from quantpipe.calibration import CalibrationSet
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import MANIFEST_NAME
from quantpipe.calibration.stored.built import write_built
from quantpipe.errors import DataError, RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.recipe.schema import Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel


class Notes(Reporter):
    """A Reporter that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def sentences(num_rows: int) -> list[str]:
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ba", "de", "ki", "lo", "mu", "ra", "si", "to") for b in ("n", "rt", "sk", "l")]
    return [" ".join(rng.choices(words, k=20)) for _ in range(num_rows)]


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    """Texts of the set in the folder ``set``."""
    texts = sentences(60)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "set" / "set.yaml").write_text("version: 1\nname: tiny\nsources:\n  - {path: rows.jsonl}\n")
    return texts


@pytest.fixture
def base(tiny_llama: Path) -> BaseModel:
    return BaseModel(tiny_llama, str(tiny_llama), Artifact.open(tiny_llama).digest, is_dequantized=False)


def recipe_of(tmp_path: Path, of: Path | dict[str, Any], **asked: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "tiny",
            "model": {"source": "model"},
            "calibration": {"set": of, **asked},
            "quantize": {"solver": {"name": "gptq"}, "scheme": {"name": "w4a16", "group_size": 64}},
            "gate": {"mean_kl": {"max": 0.1}},
            "output": tmp_path / "run",
        }
    )


def calibrated(recipe: Recipe, base: BaseModel, *texts: EvalText, reporter: Reporter | None = None) -> CalibrationSet:
    built = calibrate(recipe, base, texts, reporter or Notes())
    assert built is not None
    return built


@pytest.mark.usefixtures("rows")
def test_a_recipe_builds_its_set_and_tells_the_account(tmp_path: Path, base: BaseModel) -> None:
    notes = Notes()
    built = calibrated(recipe_of(tmp_path, tmp_path / "set", num_sequences=4, sequence_length=32), base, reporter=notes)
    assert built.token_ids.shape == (4, 32)
    header = next(i for i, line in enumerate(notes.told) if line.split()[:2] == ["source", "asked"])
    assert notes.told[header + 1].split()[:2] == ["rows.jsonl", "128"]
    assert not (tmp_path / "run" / CACHE_FOLDER).exists()
    write_manifest(tmp_path / "run", built)
    assert json.loads((tmp_path / "run" / MANIFEST_NAME).read_text())["blocks_sha256"] == built.digest


@pytest.mark.usefixtures("rows")
def test_a_set_inside_the_recipe_builds_the_same_blocks(tmp_path: Path, base: BaseModel) -> None:
    asked = {"num_sequences": 4, "sequence_length": 32}
    inline = {"sources": [{"path": str(tmp_path / "set" / "rows.jsonl")}]}
    inside = calibrated(recipe_of(tmp_path, inline, **asked), base)
    assert inside.digest == calibrated(recipe_of(tmp_path, tmp_path / "set", **asked), base).digest


@pytest.mark.usefixtures("rows")
def test_blocks_built_before_are_used_as_they_are(tmp_path: Path, base: BaseModel) -> None:
    built = calibrated(recipe_of(tmp_path, tmp_path / "set", num_sequences=5, sequence_length=16), base)
    write_built(tmp_path / "built", built)
    (tmp_path / "set" / "rows.jsonl").unlink()
    recipe = recipe_of(tmp_path, tmp_path / "built")
    assert budget_of(recipe).num_tokens == 80
    read = calibrated(recipe, base)
    assert np.array_equal(read.token_ids, built.token_ids)
    with pytest.raises(RecipeError, match=r"calibration.sequence_length: found 32, .*built were built with 16"):
        calibrated(recipe_of(tmp_path, tmp_path / "built", sequence_length=32), base)
    with pytest.raises(RecipeError, match=r"calibration.seed: found 7, .*built were built with 0; leave it out"):
        calibrated(recipe_of(tmp_path, tmp_path / "built", seed=7), base)


@pytest.mark.parametrize("on_leakage", ["refuse", "drop"])
def test_an_evaluation_text_among_the_rows_is_refused_or_dropped(
    tmp_path: Path, base: BaseModel, rows: list[str], on_leakage: str
) -> None:
    recipe = recipe_of(tmp_path, tmp_path / "set", num_sequences=4, sequence_length=32, on_leakage=on_leakage)
    texts = [EvalText("evals/support", "items.jsonl:3", rows[16]), EvalText("evals/support", "items.jsonl:9", "other")]
    if on_leakage == "refuse":
        with pytest.raises(DataError) as caught:
            calibrated(recipe, base, *texts)
        assert "1 row overlaps evals/support (1 exact)" in str(caught.value)
        assert "rows.jsonl:17 = items.jsonl:3" in str(caught.value)
        assert rows[16] not in str(caught.value)
    else:
        built = calibrated(recipe, base, *texts)
        assert built.account[0].dropped == {"leaked": 1}
        assert "rows.jsonl:17" not in {document.where for document in built.documents}


def test_built_blocks_are_compared_by_the_hashes_of_their_rows(
    tmp_path: Path, base: BaseModel, rows: list[str]
) -> None:
    whole = recipe_of(tmp_path, tmp_path / "set", num_sequences=20, sequence_length=32)
    write_built(tmp_path / "built", calibrated(whole, base))
    used = {document.where for document in calibrated(whole, base).documents}
    leaked = next(text for number, text in enumerate(rows, start=1) if f"rows.jsonl:{number}" in used)
    recipe, notes = recipe_of(tmp_path, tmp_path / "built"), Notes()
    with pytest.raises(DataError, match=r"1 row is an evaluation text: rows.jsonl:\d+ = suite:7"):
        calibrated(recipe, base, EvalText("suite", "7", leaked.upper()))
    calibrated(recipe, base, EvalText("suite", "7", "something else"), reporter=notes)
    assert any("were not compared with what this recipe evaluates on" in note for note in notes.told)


@pytest.mark.usefixtures("rows")
def test_a_failed_build_leaves_no_cache(tmp_path: Path, base: BaseModel) -> None:
    with pytest.raises(DataError, match="the set has"):
        calibrated(recipe_of(tmp_path, tmp_path / "set", num_sequences=4000), base)
    assert not (tmp_path / "run" / CACHE_FOLDER).exists()
