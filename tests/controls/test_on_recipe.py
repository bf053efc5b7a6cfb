"""`quantpipe gate --self-test`, as a user runs it."""

import json
from pathlib import Path

import pytest
import yaml

from quantpipe import cli
from quantpipe.controls.on_the_spot import write_suite
from quantpipe.controls.tiny_model import corpus
from quantpipe.errors import EXIT_CONTROLS, EXIT_DATA, EXIT_PASS, EXIT_USAGE


@pytest.fixture
def recipe(tiny_base: Path, tmp_path: Path) -> Path:
    write_suite(tmp_path / "suite")
    (tmp_path / "text").mkdir()
    half = len(corpus()) // 2
    (tmp_path / "text" / "first.txt").write_text(corpus()[:half])
    (tmp_path / "text" / "second.txt").write_text(corpus()[half:])
    divergence = {"text": "text", "num_windows": 12, "window_tokens": 64, "slices": {"f*": {"language": "en"}}}
    content = {
        "version": 1,
        "name": "controls",
        "model": {"source": str(tiny_base)},
        "engine": {"num_threads": 1, "max_model_len": 128},
        "evaluate": {"suite": "suite", "divergence": divergence},
        "bench": {"concurrency": [1], "prompt_tokens": 8, "new_tokens": 2, "repeats": 2},
        "gate": {"mean_kl": {"max": 0.0025}, "mean_kl[domain=second]": {"max": 0.0025}, "ttft_ratio_c1": {"max": 0.1}},
        "output": "run",
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_recipes_own_gate_catches_every_control(
    recipe: Path, tiny_artifacts: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["gate", str(recipe), "--artifact", str(tiny_artifacts["w8a8"]), "--self-test", "--quiet"]
    code, shown = cli.run(options), capsys.readouterr().out
    assert code == EXIT_PASS, shown
    assert "base model against itself: KL 0, 0 items flipped" in shown
    assert "FAIL    scales permuted in one layer: mean_kl" in shown
    assert "mean_kl[domain=second]" in shown
    assert "none    zero points off by one: no zero points: symmetric" in shown
    assert shown.strip().endswith("all 7 controls behave")
    assert not (recipe.parent / "run").exists()  # verdicts on damaged copies are nobody's


def test_a_lax_gate_is_told_what_it_would_have_released(
    recipe: Path, tiny_artifacts: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["gate", str(recipe), "--artifact", str(tiny_artifacts["w8a8"]), "--self-test", "--quiet"]
    assert cli.run([*options, "--set", "gate={mean_kl: {max: 9}}"]) == EXIT_CONTROLS
    shown = capsys.readouterr().out
    assert "PASS    ! scales permuted in one layer: the gate would have released this: mean_kl" in shown
    assert "3 of 7 controls misbehave" in shown  # template and tokenizer are caught whatever the limits are


def test_what_cannot_be_tested_is_one_clear_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["gate", str(recipe), "--self-test", "--quiet"]) == EXIT_DATA
    assert "run the recipe first, or name an artifact with --artifact" in capsys.readouterr().err
    timed = ["--set", "gate={ttft_ratio_c1: {max: 2}}"]
    assert cli.run(["gate", str(recipe), "--self-test", "--quiet", *timed]) == EXIT_USAGE
    assert "gate: every limit is on a time" in capsys.readouterr().err
    assert cli.run(["gate", "--quiet"]) == EXIT_USAGE
    assert "Missing argument 'RECIPE'" in capsys.readouterr().err
    assert cli.run(["gate", str(recipe), "--self-test", "--power"]) == EXIT_USAGE
    assert "--self-test: judges, and --power does not" in capsys.readouterr().err


def test_a_stored_baseline_gives_the_same_verdict_and_is_used_again(
    recipe: Path,
    tiny_artifacts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUANTPIPE_CACHE", str(tmp_path / "cache"))
    limits = "gate={mean_kl_topk: {max: 0.0025}, 'worst_domain_kl_topk': {max: 0.0025}}"
    options = ["--set", "evaluate.divergence.reference=stored", "--set", limits]
    for name, code in (("w8a8", 0), ("w4a16 g32", 4)):
        assert cli.run(["gate", str(recipe), "--artifact", str(tiny_artifacts[name]), *options]) == code
    assert len(list((tmp_path / "cache" / "references").iterdir())) == 1
    assert "the baseline's predictions were stored before" in capsys.readouterr().err
    record = json.loads((tmp_path / "run" / "gate-w8a8" / "divergence.json").read_text())
    assert (record["baseline"], record["top_k"]) == ("stored", 128)
    assert {window["fields"].get("language") for window in record["windows"]} == {"en", None}
