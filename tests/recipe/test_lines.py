"""Refusals that come late still name the line of the recipe."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe.errors import DataError, RecipeError
from quantpipe.pipeline import quantize_recipe, run_recipe
from quantpipe.recipe.lines import naming_lines, with_line
from quantpipe.recipe.schema import Recipe, load_recipe
from quantpipe.report import Reporter

RECIPE = """\
version: 1
name: late
model: {model}
quantize:
  solver: gptq
  scheme: {{name: w4a16, group_size: 64}}
  transforms: [rotate]
  ignore:
    - lm_head
    - model.layers.0.self_attn.z_proj
calibration:
  set: {{sources: [{{kind: python_stdlib, content: topics}}]}}
output: {output}
"""
Make = Callable[..., Path]


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Recipe:
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE.format(model=tiny_llama, output=tmp_path / "run"))
    return load_recipe(file)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("quantize.scheme.group_size: 64 does not divide", "r.yaml:6:37"),
        ("quantize.ignore[1]: 'x' names no Linear", "r.yaml:10:7"),
        ("quantize.ignore: every Linear is ignored", "r.yaml:9:5"),
        ("quantize.transforms: rotate: no matrix reads it", "r.yaml:7:16"),
        ("quantize.transforms: no such list", "r.yaml:7:15"),
        ("quantize.allocate.max_bytes: too little", "r.yaml:4:1"),
        ("model: has no stack of decoder blocks", "r.yaml:3:8"),
        ("calibration: packing 'separate': keeps a state", "r.yaml:12:3"),
    ],
)
def test_a_refusal_that_begins_with_a_key_gets_the_place_of_its_value(recipe: Recipe, text: str, place: str) -> None:
    assert with_line(recipe, text) == f"{recipe.folder}/{place}: {text}"


def test_a_limit_on_a_slice_is_found_by_its_name(recipe: Recipe) -> None:
    file = recipe.folder / "r.yaml"
    evaluate = "evaluate: {suite: suite, divergence: {text: r.yaml}}\n"
    file.write_text(file.read_text() + evaluate + "gate:\n  mean_kl: {max: 1}\n  'mean_kl[domain=law]': {max: 1}\n")
    (recipe.folder / "suite").mkdir()
    (recipe.folder / "suite" / "suite.yaml").touch()
    text = "gate: mean_kl[domain=law]: no window has domain 'law'"
    assert with_line(load_recipe(file), text) == f"{file}:17:26: {text}"


def test_a_value_that_an_option_gave_is_named_once(recipe: Recipe) -> None:
    changed = load_recipe(recipe.folder / "r.yaml", ["output=elsewhere"])
    assert with_line(changed, "output: /x cannot be written") == "--set output: /x cannot be written"


def test_refusals_of_data_keep_their_exit_code(recipe: Recipe) -> None:
    with pytest.raises(DataError, match=r"r\.yaml:13:9: output: /x cannot be written$"), naming_lines(recipe):
        raise DataError("output: /x cannot be written")


@pytest.mark.parametrize("text", ["set.yaml:3:1: weight: found -1", "bench: is not written", "/a/b: is quantized"])
def test_other_refusals_stay_as_they_are(recipe: Recipe, text: str) -> None:
    with pytest.raises(RecipeError) as caught, naming_lines(recipe):
        raise RecipeError(text)
    assert str(caught.value) == text


def test_what_the_model_refuses_names_the_line_of_the_recipe(recipe: Recipe, tmp_path: Path, quiet: Reporter) -> None:
    with pytest.raises(
        RecipeError, match=r"r\.yaml:10:7: quantize\.ignore\[1\]: 'model\.layers\.0\.self_attn\.z_proj'"
    ):
        quantize_recipe(recipe, tmp_path / "cache", quiet)


def test_a_recipe_without_limits_is_refused_by_run_before_anything_is_done(
    recipe: Recipe, tmp_path: Path, quiet: Reporter
) -> None:
    with pytest.raises(RecipeError) as caught:
        run_recipe(recipe, tmp_path / "r.yaml", tmp_path / "cache", quiet)
    assert str(caught.value) == (
        f"{tmp_path}/r.yaml:1:1: gate: missing, and nothing is judged without limits; add gate: "
        "{mean_kl: {max: 0.05}} with an evaluate section, or make the artifact alone with quantpipe quantize"
    )
    assert not (tmp_path / "run").exists()
