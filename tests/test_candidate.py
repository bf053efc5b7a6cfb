import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantpipe import candidate
from quantpipe.candidate import make_candidate
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.device_memory import HostMemory
from quantpipe.errors import DataError, RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.recipe.schema import CalibrationSection, Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

CONFIG = EngineConfig(num_threads=1)


@pytest.fixture
def base(tiny_llama: Path) -> BaseModel:
    return BaseModel(tiny_llama, str(tiny_llama), Artifact.open(tiny_llama).digest, is_dequantized=False)


def recipe(base: BaseModel, output: Path, **quantize: object) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "tiny",
            "model": {"source": str(base.folder)},
            "quantize": {"solver": {"name": "rtn"}, "scheme": {"name": "w8a8"}, **quantize},
            "gate": {"mean_kl": {"max": 0.1}},
            "output": output,
        }
    )


def test_two_runs_write_the_same_bytes(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    first, second = (make_candidate(recipe(base, tmp_path / name), base, CONFIG, quiet) for name in ("a", "b"))
    for path in sorted(first.artifact.folder.iterdir()):
        assert path.read_bytes() == (second.artifact.folder / path.name).read_bytes(), path.name


def test_only_what_changes_the_tensors_makes_a_new_artifact(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    def make(**quantize: object) -> candidate.Candidate:
        return make_candidate(recipe(base, tmp_path / "run", **quantize), base, CONFIG, quiet)

    assert not make().was_reused
    assert make().was_reused
    assert not make(scheme={"name": "w4a16", "group_size": 32}).was_reused
    assert not make(kv_cache="int8_per_token_head").was_reused


@pytest.mark.parametrize("damage", ["weights", "parity", "manifest"])
def test_a_damaged_artifact_is_made_again(base: BaseModel, tmp_path: Path, quiet: Reporter, damage: str) -> None:
    made = make_candidate(recipe(base, tmp_path / "run"), base, CONFIG, quiet)
    folder = made.artifact.folder
    if damage == "weights":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    elif damage == "parity":
        (folder.parent / "parity.json").write_text("{")
    else:
        (folder / "quantpipe.json").write_text("[]")
    again = make_candidate(recipe(base, tmp_path / "run"), base, CONFIG, quiet)
    assert not again.was_reused
    assert again.artifact.digest == made.artifact.digest


def test_a_disk_too_small_is_noticed_before_the_work(
    base: BaseModel, tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    with pytest.raises(DataError, match=r"0\.00 GB free, the artifact and the work on it may need"):
        make_candidate(recipe(base, tmp_path / "run"), base, CONFIG, quiet)
    assert not (tmp_path / "run").exists()


def test_a_quantized_base_is_refused(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    artifact = make_candidate(recipe(base, tmp_path / "run"), base, CONFIG, quiet).artifact
    again = BaseModel(artifact.folder, "again", artifact.digest, is_dequantized=False)
    with pytest.raises(RecipeError, match="is quantized already"):
        make_candidate(recipe(again, tmp_path / "other"), again, CONFIG, quiet)


def test_without_quantize_the_base_is_released_as_it_is(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    plain = recipe(base, tmp_path / "run").model_copy(update={"quantize": None})
    artifact = make_candidate(plain, base, CONFIG, quiet).artifact
    assert artifact.schemes == {}
    assert "quantization_config" not in json.loads((artifact.folder / "config.json").read_text())
    weights = "model.safetensors"
    original = Artifact.open(base.folder)
    assert artifact.tensor_names() == original.tensor_names(), weights


def test_manifest_says_where_the_artifact_came_from(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    manifest = make_candidate(recipe(base, tmp_path / "run"), base, CONFIG, quiet).artifact.manifest
    assert manifest is not None
    assert manifest["base"]["digest"] == base.digest
    assert manifest["calibration"] is None
    assert len(manifest["layers"]) == 42
    assert manifest["versions"]["torch"]


def test_shapes_that_fit_no_group_are_refused_before_calibration(
    random_llama: Callable[..., Path], tiny_llama: Path, tmp_path: Path, quiet: Reporter
) -> None:
    odd = random_llama(hidden_size=80, intermediate_size=80, head_dim=20)
    base = BaseModel(odd, "odd", "0", is_dequantized=False)
    with pytest.raises(RecipeError, match="use channel, or list them"):
        make_candidate(recipe(base, tmp_path / "run", scheme={"name": "w4a16"}), base, CONFIG, quiet)


def test_files_that_are_no_artifact_are_never_replaced(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    precious = tmp_path / "run" / "artifact" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    with pytest.raises(DataError, match="holds files that are no artifact"):
        make_candidate(recipe(base, tmp_path / "run"), base, CONFIG, quiet)
    assert precious.read_text() == "mine"
    assert list((tmp_path / "run").iterdir()) == [precious.parent]


def test_a_weight_that_is_not_finite_is_named_before_any_block_is_quantized(
    base: BaseModel, tmp_path: Path, quiet: Reporter
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(base.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.5.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    damaged = BaseModel(folder, "damaged", "0", is_dequantized=False)
    with pytest.raises(DataError, match=r"model\.layers\.5\.mlp\.up_proj\.weight holds NaN"):
        make_candidate(recipe(damaged, tmp_path / "run"), damaged, CONFIG, quiet)
    assert not (tmp_path / "run").exists()


def test_a_budget_out_of_reach_is_refused_before_calibration(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    allocate = {"scheme": {"name": "w8a16", "group_size": 32}, "average_bits": 3.0}
    wanted = recipe(base, tmp_path / "run", scheme={"name": "w4a16", "group_size": 32}, allocate=allocate)
    with pytest.raises(RecipeError, match="legal range"):
        make_candidate(wanted, base, CONFIG, quiet)
    assert not (tmp_path / "run").exists()


def test_a_model_that_no_rotation_passes_through_is_refused_and_leaves_nothing(
    tiny_model: Callable[..., Path], base: BaseModel, tmp_path: Path, quiet: Reporter
) -> None:
    folder = tiny_model("gemma3")
    gemma = BaseModel(folder, str(folder), Artifact.open(folder).digest, is_dequantized=False)
    asked = recipe(gemma, tmp_path / "run", transforms=[{"name": "rotate"}], solver={"name": "gptq"})
    with pytest.raises(RecipeError, match=r"rotate: model\.layers\.0\.post_attention_layernorm scales channels"):
        make_candidate(asked, gemma, None, quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_sequences_longer_than_the_model_reads_are_refused_before_calibration(
    tiny_model: Callable[..., Path], tmp_path: Path, quiet: Reporter, family: str
) -> None:
    folder = tiny_model(family)
    made_of = BaseModel(folder, str(folder), Artifact.open(folder).digest, is_dequantized=False)
    asked = recipe(made_of, tmp_path / "run", solver={"name": "gptq"}, scheme={"name": "w4a16", "group_size": 32})
    texts = {"sources": [{"kind": "python_stdlib", "content": "topics"}]}
    calibration = CalibrationSection.model_validate({"set": texts, "num_sequences": 2, "sequence_length": 257})
    message = (
        r"^calibration\.sequence_length: 257 tokens are more than the 256 that the model reads "
        r"\(max_position_embeddings\); lower it to at most 256$"
    )
    with pytest.raises(RecipeError, match=message):
        make_candidate(asked.model_copy(update={"calibration": calibration}), made_of, None, quiet)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_leaves_no_work_folder(base: BaseModel, tmp_path: Path, quiet: Reporter) -> None:
    make_candidate(recipe(base, tmp_path / "run"), base, CONFIG, quiet)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["artifact", "parity.json"]


def test_too_little_memory_for_parity_is_said_at_once_and_the_finished_blocks_are_kept(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(base, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(HostMemory, "available_bytes", lambda _self: 1_000_000)
        with pytest.raises(DataError) as caught:
            make_candidate(asked, base, CONFIG, Reporter())
    text = str(caught.value)
    assert re.search(
        r"parity needs about 0\.\d\d GB of memory \(.*\), and 0\.00 GB are available; the artifact is", text
    )
    assert "\n" not in text
    told = capsys.readouterr().err
    assert told.index("parity needs about") < told.index("quantize: rtn")
    assert "parity: simulated" not in told
    assert list((tmp_path / "run" / "work").iterdir())
    assert not make_candidate(asked, base, CONFIG, Reporter(quiet=True)).was_reused
    assert not (tmp_path / "run" / "work").exists()
