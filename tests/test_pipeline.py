import shutil
from pathlib import Path

import pytest
import torch
import transformers
from architectures import MakeModel

from quantpipe.errors import ArtifactError, DataError, RecipeError
from quantpipe.gate.record import REPORT_NAMES
from quantpipe.pipeline import gate_artifact, only_run, quantization_facts, quantize_recipe, run_recipe
from quantpipe.recipe.schema import Recipe, load_recipe
from quantpipe.report import Reporter


def recipe(model: Path, output: Path) -> Recipe:
    """Bench metrics only: nothing is evaluated, so that little runs."""
    return Recipe.model_validate(
        {
            "version": 1,
            "name": "timed",
            "model": {"source": str(model)},
            "engine": {"num_threads": 1, "max_model_len": 64},
            "bench": {"concurrency": [2], "prompt_tokens": 8, "new_tokens": 2, "repeats": 2},
            "gate": {"tpot_ratio_c2": {"max": 1000.0}},
            "output": output,
        }
    )


def test_a_recipe_without_quantization_or_evals_still_gives_a_verdict(
    tiny_llama: Path, tmp_path: Path, quiet: Reporter
) -> None:
    result = run_recipe(recipe(tiny_llama, tmp_path / "run"), Path("timed.yaml"), tmp_path / "cache", quiet)
    assert [check.metric for check in result.checks] == ["tpot_ratio_c2", "manifest_mismatches", "prompt_mismatches"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"artifact", "gate.json", "items.jsonl", "measurements.json", "parity.json", *REPORT_NAMES}
    assert "quantpipe run timed.yaml" in (tmp_path / "run" / "report.md").read_text()


def test_an_archive_that_cannot_be_written_is_refused_before_any_work(
    tiny_llama: Path, tmp_path: Path, quiet: Reporter
) -> None:
    (tmp_path / "file").write_text("")
    asked = recipe(tiny_llama, tmp_path / "run").model_copy(update={"archive": tmp_path / "file" / "archive"})
    for work in (
        lambda: run_recipe(asked, Path("timed.yaml"), tmp_path / "cache", quiet),
        lambda: gate_artifact(asked, Path("timed.yaml"), tiny_llama, tmp_path / "cache", quiet),
    ):
        with pytest.raises(DataError, match="is a file; set `archive`"):
            work()
    assert not (tmp_path / "run").exists()


def test_a_recipe_may_keep_no_archive(tiny_llama: Path, tmp_path: Path, quiet: Reporter) -> None:
    asked = recipe(tiny_llama, tmp_path / "run").model_copy(update={"archive": Path("none")})
    gate_artifact(asked, Path("timed.yaml"), tiny_llama, tmp_path / "cache", quiet)
    assert not (tmp_path / "archive").exists()


def test_answers_lie_beside_the_verdict_and_no_model_is_asked_the_same_twice(
    tiny_llama: Path, tmp_path: Path, quiet: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = Path(__file__).parents[1] / "evals" / "support.yaml"
    sections = {"evaluate": {"suite": suite}, "gate": {"accuracy_loss_points": {"max": 100.0}}, "bench": None}
    told = []
    for name in ("first", "second"):
        plain = recipe(tiny_llama, tmp_path / name).model_dump(exclude={"engine"}) | sections
        asked = Recipe.model_validate(plain | {"engine": {"num_threads": 1, "max_model_len": 512}})
        run_recipe(asked, Path("r.yaml"), tmp_path / "cache", Reporter())
        told.append(capsys.readouterr().err)
        assert {"outputs-baseline.jsonl", "outputs-candidate.jsonl"} <= {f.name for f in (tmp_path / name).iterdir()}
    again = [text.count("answers of an earlier run of the same model") for text in told]
    assert again[1] == 1  # the candidate is the base itself here, and is asked anew: do its answers stay?
    first, second = ((tmp_path / name / "outputs-candidate.jsonl").read_bytes() for name in ("first", "second"))
    assert first == second


def test_a_held_out_text_too_short_for_the_coverage_does_not_stop_quantizing(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("a few words only")
    evals = Path(__file__).parents[1] / "evals" / "quickstart"
    asked = Recipe.model_validate(
        {
            "version": 1,
            "name": "tiny",
            "model": {"source": str(tiny_llama)},
            "calibration": {
                "set": {"sources": [{"kind": "python_stdlib", "content": "topics"}]},
                "num_sequences": 2,
                "sequence_length": 32,
            },
            "quantize": {"solver": {"name": "gptq"}, "scheme": {"name": "w4a16", "group_size": 64}},
            "evaluate": {"suite": evals, "divergence": {"text": tmp_path / "short.txt", "num_windows": 5}},
            "gate": {"mean_kl": {"max": 1.0}},
            "output": tmp_path / "run",
        }
    )
    candidate = quantize_recipe(asked, tmp_path / "cache", Reporter())
    assert "coverage looks at no held-out text: " in capsys.readouterr().err
    assert ("coverage", "see coverage.md") in quantization_facts(asked, candidate, 1.0)
    assert "No held-out text was there" in (tmp_path / "run" / "coverage.md").read_text(encoding="utf-8")


def test_an_artifact_that_is_not_there_is_refused_before_the_evals(
    tiny_llama: Path, tmp_path: Path, quiet: Reporter
) -> None:
    asked = recipe(tiny_llama, tmp_path / "run")
    with pytest.raises(ArtifactError, match="no such folder"):
        gate_artifact(asked, Path("timed.yaml"), tmp_path / "nowhere", tmp_path / "cache", quiet)
    assert not (tmp_path / "run").exists()


def test_a_second_run_into_the_same_output_is_refused(tmp_path: Path) -> None:
    with (
        only_run(tmp_path / "run"),
        pytest.raises(DataError, match="another run is writing here"),
        only_run(tmp_path / "run"),
    ):
        pass
    with only_run(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_output_below_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(DataError, match=r"^output: .* cannot be written: it lies below a file; choose another"),
        only_run(tmp_path / "file" / "run"),
    ):
        pass


def test_a_model_that_is_quantized_and_not_served_is_sent_to_quantize(
    tiny_llama: Path, tiny_model: MakeModel, tmp_path: Path, quiet: Reporter
) -> None:
    folder = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "mixtral"))
    shutil.copy(tiny_llama / "tokenizer.json", folder)
    with pytest.raises(ArtifactError) as caught:
        run_recipe(recipe(folder, tmp_path / "run"), Path("r.yaml"), tmp_path / "cache", quiet)
    text = str(caught.value)
    assert text.startswith(
        f"{folder}/config.json: model_type 'mixtral' is not served by the bundled runtime (it serves "
    )
    assert text.endswith("; `quantpipe quantize` works on it, for another runtime")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("held", ["BertForMaskedLM", "LlamaForSequenceClassification"])
def test_a_model_that_is_neither_served_nor_quantized_is_not_sent_there(
    tiny_llama: Path, tmp_path: Path, quiet: Reporter, held: str
) -> None:
    """The tensors of a classifier lack a head; that is no damage."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig if held.startswith("Bert") else transformers.LlamaConfig
    getattr(transformers, held)(config(vocab_size=64, **sizes)).save_pretrained(tmp_path / "model")
    shutil.copy(tiny_llama / "tokenizer.json", tmp_path / "model")
    with pytest.raises(ArtifactError, match=f"config.json: holds a {held}; supported are decoder-only language models"):
        run_recipe(recipe(tmp_path / "model", tmp_path / "run"), Path("r.yaml"), tmp_path / "cache", quiet)
    assert not (tmp_path / "run").exists()


TRITON = """\
version: 1
name: tiny
model: {model}
quantize: {{solver: rtn, scheme: {{name: w4a16, group_size: 64}}}}
engine:
  backend: {backend}
bench: {{concurrency: [2], prompt_tokens: 8, new_tokens: 2, repeats: 2}}
gate: {{tpot_ratio_c2: {{max: 1000.0}}}}
output: run
"""
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def written(folder: Path, model: Path, backend: str = "triton") -> Recipe:
    (folder / "r.yaml").write_text(TRITON.format(model=model, backend=backend))
    return load_recipe(folder / "r.yaml")


@WITHOUT_GPU
def test_a_backend_that_this_machine_cannot_run_is_refused_before_anything_else(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = written(tmp_path, tiny_llama)
    place = rf"^{tmp_path}/r\.yaml:6:12: engine\.backend: 'triton' needs a CUDA GPU"
    with pytest.raises(RecipeError, match=place):
        run_recipe(asked, tmp_path / "r.yaml", tmp_path / "cache", Reporter())
    with pytest.raises(RecipeError, match=place):
        gate_artifact(asked, tmp_path / "r.yaml", tiny_llama, tmp_path / "cache", Reporter())
    assert capsys.readouterr().err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"r.yaml"}


@WITHOUT_GPU
def test_what_a_gpu_will_serve_is_quantized_without_one_and_that_is_said(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quantize_recipe(written(tmp_path, tiny_llama), tmp_path / "cache", Reporter())
    told = " ".join(capsys.readouterr().err.split())
    assert "parity is checked in transformers only: engine.backend: 'triton' needs a CUDA GPU" in told
    assert [row.comparison for row in made.parity] == ["simulated, reloaded by transformers"]
    assert quantize_recipe(written(tmp_path, tiny_llama), tmp_path / "cache", Reporter(quiet=True)).was_reused
    # where it can be served it is not taken on trust
    served = quantize_recipe(written(tmp_path, tiny_llama, "cpu"), tmp_path / "cache", Reporter(quiet=True))
    assert (served.was_reused, len(served.parity)) == (False, 4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_model_len: 4096", "engine.max_model_len: 4,096 exceeds the model's own limit"),
        ("window_tokens: 4096", "engine.window_tokens: 4,096 with 0 sinks exceed the model's own limit"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused_before_it_is_quantized(
    tiny_llama: Path, tmp_path: Path, quiet: Reporter, setting: str, message: str
) -> None:
    (tmp_path / "r.yaml").write_text(
        TRITON.format(model=tiny_llama, backend="cpu").replace("bench:", f"  {setting}\nbench:")
    )
    with pytest.raises(RecipeError) as caught:
        run_recipe(load_recipe(tmp_path / "r.yaml"), tmp_path / "r.yaml", tmp_path / "cache", quiet)
    assert str(caught.value).startswith(f"{tmp_path}/r.yaml:7:18: {message}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model_type", ["bert", "mamba"])
def test_a_model_that_cannot_be_quantized_is_refused_without_a_word_about_parity(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    kind = transformers.BertForMaskedLM if model_type == "bert" else transformers.MambaForCausalLM
    kind(config).save_pretrained(tmp_path / "model")
    shutil.copy(tiny_llama / "tokenizer.json", tmp_path / "model")
    with pytest.raises((ArtifactError, RecipeError)):
        quantize_recipe(written(tmp_path, tmp_path / "model", "cpu"), tmp_path / "cache", Reporter())
    assert "parity" not in capsys.readouterr().err
