import shutil
from pathlib import Path

import pytest
import transformers
from architectures import MakeModel

from quantpipe.errors import ArtifactError, DataError
from quantpipe.pipeline import gate_artifact, only_run, quantization_facts, quantize_recipe, run_recipe
from quantpipe.recipe.schema import Recipe
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
    assert names == {"artifact", "gate.json", "parity.json", "report.md"}
    assert "quantpipe run timed.yaml" in (tmp_path / "run" / "report.md").read_text()


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
    assert ("coverage", "[coverage.md](coverage.md)") in quantization_facts(asked, candidate, 1.0)
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
