"""Sets compared with the tiny trained model. Candidates are copies of it with more or less noise in one matrix."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantpipe.calibrate.compare.comparison import ComparedRun, compare_runs, compare_sets, runs_of
from quantpipe.calibrate.compare.comparison_texts import HeldOutText, Wanted
from quantpipe.errors import RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.recipe.schema import Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

NOISY = "model.layers.0.mlp.up_proj.weight"
NOISE = {"close": 0.02, "far": 0.2}


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Recipe:
    fields: dict[str, Any] = {
        "version": 1,
        "name": "tiny",
        "model": {"source": str(tiny_llama)},
        "calibration": {"set": tmp_path / "unused", "num_sequences": 4, "sequence_length": 32, "seed": 5},
        "quantize": {"solver": {"name": "gptq"}, "scheme": {"name": "w3a16", "group_size": 64}},
        "engine": {"num_threads": 1, "max_model_len": 128},
        "gate": {"mean_kl": {"max": 1.0}},
        "output": tmp_path / "run",
    }
    return Recipe.model_validate(fields)


@pytest.fixture
def base(tiny_llama: Path) -> BaseModel:
    return BaseModel(tiny_llama, str(tiny_llama), Artifact.open(tiny_llama).digest, is_dequantized=False)


@pytest.fixture
def texts() -> list[HeldOutText]:
    windows = torch.randint(400, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
    return [HeldOutText("banking", "held out", windows[:2]), HeldOutText("code", "code.txt", windows[2:])]


@pytest.fixture
def make(tiny_llama: Path) -> Callable[[ComparedRun], Artifact]:
    """Makes a candidate as a recipe would: in the run's own folder, the same one for the same set and seed."""

    def noisy(run: ComparedRun) -> Artifact:
        folder = run.recipe.output / "artifact"
        shutil.copytree(tiny_llama, folder, dirs_exist_ok=True)
        tensors = load_file(tiny_llama / "model.safetensors")
        noise = torch.randn(tensors[NOISY].shape, generator=torch.Generator().manual_seed(run.seed))
        tensors[NOISY] += NOISE[run.set_name] * tensors[NOISY].std() * noise.to(tensors[NOISY].dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return Artifact.open(folder)

    return noisy


def test_every_set_runs_with_every_seed_in_a_folder_of_its_own(recipe: Recipe) -> None:
    runs = runs_of(recipe, {"close": Path("/sets/close"), "far": Path("/sets/far")}, 2)
    assert [(run.set_name, run.seed) for run in runs] == [("close", 5), ("far", 5), ("close", 6), ("far", 6)]
    assert runs[3].recipe.output == recipe.output / "compare" / "far-6"
    section = runs[3].recipe.calibration
    assert section is not None
    assert (section.set, section.seed, section.num_sequences) == (Path("/sets/far"), 6, 4)
    assert runs[3].recipe.quantize == recipe.quantize


@pytest.mark.parametrize("missing", ["calibration", "quantize"])
def test_a_recipe_that_learns_from_no_set_is_refused(recipe: Recipe, missing: str) -> None:
    with pytest.raises(RecipeError, match="nothing in it reads a calibration set"):
        runs_of(recipe.model_copy(update={missing: None}), {"a": Path("a"), "b": Path("b")}, 2)


def test_candidates_are_measured_on_every_domain_and_told_apart(
    recipe: Recipe,
    base: BaseModel,
    texts: list[HeldOutText],
    make: Callable[[ComparedRun], Artifact],
    quiet: Reporter,
) -> None:
    runs = runs_of(recipe, {name: Path(name) for name in NOISE}, 3)
    found = compare_runs(recipe, runs, base, texts, make, quiet)
    mean = {(spread.domain, spread.name): spread.mean for spread in found.spreads}
    for domain in ("banking", "code"):
        assert 0 < mean[domain, "close"] < mean[domain, "far"]
    assert {each.better for each in found.differences} == {"close"}
    assert found.seeds == (5, 6, 7)
    record = json.loads((recipe.output / "compare" / "comparison.json").read_text(encoding="utf-8"))
    assert [run["mean_kl"] for run in record["runs"]] == [dict(run.mean_kl) for run in found.runs]
    assert "| far | 7 |" in (recipe.output / "compare" / "comparison.md").read_text(encoding="utf-8")


def test_what_was_measured_is_kept_until_the_candidate_or_the_texts_change(
    recipe: Recipe,
    base: BaseModel,
    texts: list[HeldOutText],
    make: Callable[[ComparedRun], Artifact],
    quiet: Reporter,
) -> None:
    runs = runs_of(recipe, {name: Path(name) for name in NOISE}, 2)
    first = compare_runs(recipe, runs, base, texts, make, quiet)
    kept = {path: path.stat().st_mtime_ns for path in recipe.output.rglob("fidelity.json")}
    assert len(kept) == 4
    assert compare_runs(recipe, runs, base, texts, make, quiet) == first
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    (recipe.output / "compare" / "far-6" / "fidelity.json").write_text("{")  # cut off by a crash
    assert compare_runs(recipe, runs, base, texts, make, quiet) == first
    other = [texts[0], HeldOutText("code", "other.txt", texts[0].windows)]
    changed = compare_runs(recipe, runs, base, other, make, quiet)
    assert changed.runs[0].mean_kl != first.runs[0].mean_kl
    assert all(path.stat().st_mtime_ns != before for path, before in kept.items())


@pytest.mark.parametrize(
    ("window_tokens", "sequence_length", "message"),
    [
        (
            2000,
            32,
            r"--window-tokens: 2,000 tokens are more than the 128 that the model reads \(engine\.max_model_len\)",
        ),
        (24, 5000, r"calibration\.sequence_length: 5,000 tokens are more than the 2,048 that the model reads"),
    ],
)
def test_lengths_that_the_model_does_not_read_are_refused_before_a_set_is(
    recipe: Recipe, tmp_path: Path, quiet: Reporter, window_tokens: int, sequence_length: int, message: str
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        source = "{kind: python_stdlib, content: topics}"
        (tmp_path / name / "set.yaml").write_text(f"version: 1\nname: {name}\nsources: [{source}]\n")
    assert recipe.calibration is not None
    calibration = recipe.calibration.model_copy(update={"sequence_length": sequence_length})
    asked = recipe.model_copy(update={"calibration": calibration, "output": tmp_path / "runs" / "one"})
    # the text is looked for only after the lengths
    wanted = Wanted({"gone": tmp_path / "gone.txt"}, 2, window_tokens)
    with pytest.raises(RecipeError, match=message):
        compare_sets(asked, [tmp_path / "a", tmp_path / "b"], 2, wanted, tmp_path / "cache", quiet)
    assert not (tmp_path / "runs").exists()
