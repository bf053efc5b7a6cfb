"""What is planned: configs, folders, artifacts and recipes, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
from planned import GEMMA3_4B, LLAMA_8B, shape_in, write_config

from quantpipe.errors import ArtifactError, DataError, RecipeError
from quantpipe.plan.subject import changed, default_context, read_subject
from quantpipe.plan.weights import linear_bits

GOLDEN = Path(__file__).parents[1] / "golden"
TOP = "version: 1\nname: some\nmodel: {model}\noutput: out\n"


def write_recipe(folder: Path, quantize: str, model: str = "./base") -> Path:
    (folder / "base").mkdir(exist_ok=True)
    write_config(folder / "base", LLAMA_8B)
    path = folder / "recipe.yaml"
    path.write_text(TOP.format(model=model) + quantize, encoding="utf-8")
    return path


def test_an_artifact_is_planned_as_it_is_stored_and_its_base_without_schemes() -> None:
    subject = read_subject(GOLDEN / "w8a8", (), None, GOLDEN)
    assert subject.shape.scheme_label == "w8a8"
    assert subject.base.scheme_label == subject.base.float_label
    manifest = json.loads((GOLDEN / "w8a8" / "quantpipe.json").read_text(encoding="utf-8"))
    assert subject.kv_dtype == manifest.get("kv_cache", "auto")


def test_a_folder_of_a_config_alone_will_do(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B)
    shape = read_subject(tmp_path, (), None, tmp_path).shape
    assert (shape.num_weights, shape.float_bytes) == (8_030_261_248, 2)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("float16", 2), (None, 2)])
def test_a_configs_dtype_gives_the_bytes_of_a_number(tmp_path: Path, dtype: str | None, num_bytes: int) -> None:
    assert shape_in(tmp_path, LLAMA_8B | {"torch_dtype": dtype}).float_bytes == num_bytes


def test_the_text_part_of_a_larger_model_is_planned(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, {"model_type": "gemma3", "text_config": GEMMA3_4B})
    assert shape.family == "gemma3_text" and shape.is_served
    assert "only text_config is planned: the text part of a larger model" in shape.notes


def test_a_served_family_with_something_unserved_is_planned_and_said(tmp_path: Path) -> None:
    shape = shape_in(tmp_path, LLAMA_8B | {"hidden_act": "relu"})
    assert not shape.is_served
    assert any("hidden_act 'relu'" in note for note in shape.notes)


def test_a_missing_field_is_named_with_the_file_whatever_it_is_called(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA_8B.items() if name != "hidden_size"}
    path = write_config(tmp_path, config, "some-model.json")
    with pytest.raises(ArtifactError, match=r"some-model\.json: hidden_size: it is missing"):
        read_subject(path, (), None, tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: no such file or folder; give a recipe"):
        read_subject(tmp_path / "absent", (), None, tmp_path)
    with pytest.raises(DataError, match=r"holds no config\.json"):
        read_subject(tmp_path, (), None, tmp_path)
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match=r"list\.json: holds a JSON list"):
        read_subject(tmp_path / "list.json", (), None, tmp_path)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(GOLDEN / "w4a16", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ArtifactError, match=r"model\.safetensors: not a readable safetensors file"):
        read_subject(folder, (), None, tmp_path)


def test_a_recipe_says_scheme_and_kv_cache(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "quantize: {solver: rtn, scheme: w4a16, kv_cache: int8_per_token_head}\n")
    subject = read_subject(path, (), None, tmp_path)
    assert subject.shape.scheme_label == "w4a16 g64" and subject.kv_dtype == "int8_per_token_head"
    assert subject.shape.lm_head.scheme is None and subject.base.scheme_label == "bf16"
    overridden = read_subject(path, ["quantize.scheme=w8a8"], None, tmp_path)
    assert overridden.shape.scheme_label == "w8a8"


def test_overrides_of_a_recipe_count_by_name(tmp_path: Path) -> None:
    override = "  overrides: [{modules: ['re:.*down_proj'], scheme: w8a8}]\n  ignore: [lm_head, 're:.*o_proj']\n"
    path = write_recipe(tmp_path, f"quantize:\n  solver: rtn\n  scheme: w4a16\n{override}")
    linears = {own.name.rpartition(".")[2]: own.scheme for own in read_subject(path, (), None, tmp_path).shape.linears}
    assert linears["o_proj"] is None
    assert linears["down_proj"] is not None and linears["down_proj"].name == "w8a8"
    assert linears["q_proj"] is not None and linears["q_proj"].bits == 4


def test_a_budget_of_bits_is_spent_and_not_exceeded(tmp_path: Path) -> None:
    allocate = "  allocate: {scheme: {name: w8a16, group_size: 64}, average_bits: 5}\n"
    calibration = "calibration: {set: {sources: [{path: rows.jsonl, fields: {text: text}}]}}\n"
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n', encoding="utf-8")
    path = write_recipe(tmp_path, f"{calibration}quantize:\n  solver: gptq\n  scheme: w4a16\n{allocate}")
    shape = read_subject(path, (), None, tmp_path).shape
    average = sum(map(linear_bits, shape.linears)) / sum(own.num_weights for own in shape.linears)
    assert 4.9 < average <= 5
    assert any("measured when quantizing" in note for note in shape.notes)


def test_rotation_unties_the_head(tmp_path: Path) -> None:
    calibration = "calibration: {set: {sources: [{path: rows.jsonl, fields: {text: text}}]}}\n"
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n', encoding="utf-8")
    path = write_recipe(tmp_path, f"{calibration}quantize: {{transforms: [rotate], solver: gptq, scheme: w4a16}}\n")
    tied = write_config(tmp_path, LLAMA_8B | {"tie_word_embeddings": True})
    assert not read_subject(path, (), tied, tmp_path).shape.is_head_tied
    assert read_subject(path, (), tied, tmp_path).base.is_head_tied


def test_a_recipe_with_mistakes_lists_them(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "quantize: {solver: rtn, schema: w4a16}\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml:5:.*schema"):
        read_subject(path, (), None, tmp_path)


def test_a_group_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "quantize: {solver: rtn, scheme: {name: w4a16, group_size: 128}}\n")
    config = write_config(tmp_path, LLAMA_8B | {"intermediate_size": 14400})
    with pytest.raises(RecipeError, match="128 does not divide the 14400 input features"):
        read_subject(path, (), config, tmp_path)


def test_a_model_that_is_not_here_is_not_fetched(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "quantize: {solver: rtn, scheme: w4a16}\n", "nobody/no-such-model-of-theirs")
    with pytest.raises(DataError, match=r"a plan fetches nothing; give its config\.json by --config"):
        read_subject(path, (), None, tmp_path)
    config = write_config(tmp_path, LLAMA_8B)
    assert read_subject(path, (), config, tmp_path).base.num_weights == 8_030_261_248


def test_other_weights_and_kv_caches_can_be_asked_for(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA_8B)
    subject = read_subject(tmp_path, (), None, tmp_path)
    other = changed(subject, "w4a16 g128", "int4_per_token_head")
    assert (other.shape.scheme_label, other.kv_dtype) == ("w4a16 g128", "int4_per_token_head")
    with pytest.raises(RecipeError, match=r"--scheme: unknown 'w4a16'; did you mean"):
        changed(subject, "w4a16", None)
    with pytest.raises(RecipeError, match="--kv-dtype: unknown 'int9'"):
        changed(subject, None, "int9")
    assert default_context(subject.shape) == 4096


def test_a_kv_cache_that_nobody_knows_is_refused_with_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(GOLDEN / "w4a16", folder)
    manifest = json.loads((folder / "quantpipe.json").read_text(encoding="utf-8"))
    (folder / "quantpipe.json").write_text(json.dumps(manifest | {"kv_cache": "int9"}), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"quantpipe\.json: kv_cache: unknown 'int9'"):
        read_subject(folder, (), None, tmp_path)
