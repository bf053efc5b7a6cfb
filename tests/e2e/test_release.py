"""From recipe to verdict on a real, trained model: what a user does, with the exit codes that a script sees."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantpipe import cli
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.request import SamplingParams
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.formats.artifact import verify
from quantpipe.gate.judge import Verdict
from quantpipe.gate.record import REPORT_NAMES, read_gate_json
from quantpipe.releases.archive import read_index
from quantpipe.releases.side_by_side import rows_of
from quantpipe.reporting.exhibits import Bars, Panels
from quantpipe.reporting.json_form import read_json


def test_a_good_candidate_is_released_with_everything_on_record(finished: Path) -> None:
    run = finished / "run"
    result, context = read_gate_json(run / "gate.json")
    assert result.verdict is Verdict.PASS
    assert {check.metric for check in result.checks} == {
        "perplexity_ratio",
        "mean_kl",
        "accuracy_loss_points",
        "manifest_mismatches",
        "prompt_mismatches",
    }
    assert {m.name for m in result.informational} >= {"top1_agreement", "tpot_ratio_c1", "output_tok_s_ratio_c1"}
    assert context.engine["kv_dtype"] == "int8_per_token_head"
    assert verify(run / "artifact") == []
    parity = json.loads((run / "parity.json").read_text())["rows"]
    assert len(parity) == 4
    report = (run / "report.md").read_text()
    assert report.startswith("# tiny: PASS")
    assert "simulated, reloaded by transformers" in report


def test_a_run_leaves_its_report_in_every_form_and_a_line_in_the_archive(finished: Path) -> None:
    run = finished / "run"
    report = read_json(run / "report.json")
    _, context = read_gate_json(run / "gate.json")
    assert report.data.keys() == {"suite", "held-out text", "bench"}
    sections = {section.id: section for section in report.sections}
    [windows] = [each for each in sections["divergence"].exhibits if isinstance(each, Bars)]
    assert len(windows.bars) == 8
    [panels] = [each for each in sections["layers"].exhibits if isinstance(each, Panels)]
    assert len(panels.panels) == 7
    assert dict((row[0], row[1:]) for row in rows_of(report, "memory", "Memory"))["KV cache, per token"][0] == 864
    for name in REPORT_NAMES:
        assert str(finished) not in (run / name).read_text(encoding="utf-8"), f"{name} tells where it was made"
    releases, problems = read_index(finished / "archive")
    assert problems == ()
    assert releases[0].artifact_digest == context.artifact_digest
    assert (finished / "archive" / releases[0].folder / "report.html").is_file()


def test_the_same_artifact_judged_with_another_engine_is_compared_as_the_runtimes_doing(
    finished: Path, make_project: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project()
    arguments = ["gate", str(folder / "recipe.yaml"), "--artifact", str(finished / "run" / "artifact"), "--quiet"]
    assert cli.run([*arguments, "--set", "engine.backend=torch"]) == 0
    capsys.readouterr()
    assert cli.run(["compare", str(finished / "run"), str(folder / "run" / "gate-artifact")]) == 0
    out = capsys.readouterr().out
    assert "gate-artifact is the same artifact as run, served otherwise (engine.backend cpu -> torch)" in out
    assert "| mean_kl |" in out


def test_quantization_costs_something_so_the_measurement_is_real(finished: Path) -> None:
    result, _ = read_gate_json(finished / "run" / "gate.json")
    kl = next(check.measurement for check in result.checks if check.metric == "mean_kl")
    assert kl is not None
    assert 1e-4 < kl.value < 0.005


def test_an_unchanged_recipe_uses_its_artifact_again(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    written = (finished / "run" / "artifact" / "quantpipe.json").stat().st_mtime_ns
    # another limit is another verdict, not another artifact; this one lies beyond what quantization can reach
    arguments = ["run", str(finished / "recipe.yaml"), "--set", "gate.mean_kl.max=0.00001"]
    assert cli.run([*arguments, "--set", f"output={finished / 'run'}"]) == 4
    assert (finished / "run" / "artifact" / "quantpipe.json").stat().st_mtime_ns == written
    shown = capfd.readouterr()
    assert "unchanged since the last run" in shown.err
    assert "FAIL" in shown.out
    assert cli.run(["run", str(finished / "recipe.yaml"), "--quiet"]) == 0


def test_the_artifact_loads_in_transformers_and_serves_the_same_logits(finished: Path) -> None:
    """Compared at the first position: later ones inherit the 8-bit rounding of the ones before."""
    artifact = finished / "run" / "artifact"
    token_ids = Tokenizer.open(artifact).encode("def read(self):\n    return self.")
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    with torch.no_grad():
        expected_TV = model(input_ids=torch.tensor([token_ids])).logits[0]
    rows: dict[int, torch.Tensor] = {}
    # transformers rounds activations by absmax / 127.5
    engine = Engine.open(artifact, EngineConfig(kv_dtype="auto", num_threads=1, activation_divisor=127.5))
    engine.generate(
        [token_ids],
        SamplingParams(max_tokens=0),
        prompt_logits_sinks=[
            lambda first, logits: rows.update({first + i: torch.tensor(row) for i, row in enumerate(logits)})
        ],
    )
    served_TV = torch.stack([rows[position] for position in range(len(token_ids))])
    # a last-bit difference may move an activation by one 8-bit step, no more than that here
    assert torch.allclose(served_TV, expected_TV, atol=0.25)
    assert (served_TV.argmax(-1) == expected_TV.argmax(-1)).float().mean() > 0.9


def test_the_base_against_itself_passes_and_is_identical(make_project: Callable[[], Path], tiny_llama: Path) -> None:
    folder = make_project()
    assert cli.run(["gate", str(folder / "recipe.yaml"), "--artifact", str(tiny_llama), "--quiet"]) == 0
    result, _ = read_gate_json(folder / "run" / "gate-tiny_llama" / "gate.json")
    values = {check.metric: check.measurement.value for check in result.checks if check.measurement}
    expected = {"perplexity_ratio": 1.0, "mean_kl": 0.0, "accuracy_loss_points": 0.0, "prompt_mismatches": 0.0}
    assert values == expected


def test_stored_results_are_judged_by_other_limits_and_serving_follows(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Path(shutil.copytree(finished, tmp_path / "project"))
    first, bound = read_gate_json(project / "run" / "gate.json")
    gate = ["gate", str(project / "recipe.yaml")]
    assert cli.run(gate) == 0
    again, context = read_gate_json(project / "run" / "gate.json")
    assert again == first
    digests = (context.suite_digest, context.text_digest, context.engine_digest, context.manifest_digest)
    assert all(len(digest) == 64 for digest in digests)
    assert replace(context, date=bound.date) == bound
    limits = "[{metric: accuracy, max_drop_points: 60, task: tiny_choice}, {metric: mean_kl, at_most: 1.0e-5}]"
    assert cli.run([*gate, "--set", f"gate={limits}"]) == 4
    capsys.readouterr()
    assert cli.run(["serve", str(project / "run" / "artifact"), "--port", "0"]) == 4
    assert "gate.json is FAIL; judge it" in capsys.readouterr().err
    assert cli.run([*gate, "--set", "gate=[{metric: accuracy, max_drop_points: 60, task: choice}]"]) == 2
    assert "--set gate: [0].task: no item is of task 'choice' (known: tiny_choice)" in capsys.readouterr().err


def test_limit_on_a_task_that_the_suite_has_not_is_refused_before_any_work(
    make_project: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project()
    gate = "gate=[{metric: accuracy, max_drop_points: 60, task: tiny_choise}]"
    assert cli.run(["run", str(folder / "recipe.yaml"), "--quiet", "--set", gate]) == 2
    assert (
        "--set gate: [0].task: the suite has no task 'tiny_choise'; did you mean 'tiny_choice'?"
        in capsys.readouterr().err
    )
    assert not (folder / "run").exists()


def damage(artifact: Path, folder: Path) -> Path:
    """Permute the scales of one layer's linears."""
    damaged = Path(shutil.copytree(artifact, folder / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("model.layers.2.") and name.endswith("weight_scale"):
            order = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))
            tensors[name] = tensor[order].contiguous()
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    return damaged


def test_a_damaged_artifact_fails_the_gate_and_verify_says_where(
    finished: Path, make_project: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = damage(finished / "run" / "artifact", tmp_path)
    folder = make_project()
    assert cli.run(["gate", str(folder / "recipe.yaml"), "--artifact", str(damaged), "--quiet"]) == 4
    result, _ = read_gate_json(folder / "run" / "gate-damaged" / "gate.json")
    verdicts = {check.metric: check.verdict for check in result.checks}
    # noticed twice: by what it does to the model, and by its digests
    assert verdicts["mean_kl"] is Verdict.FAIL
    assert verdicts["manifest_mismatches"] is Verdict.FAIL
    capsys.readouterr()
    assert cli.run(["verify", str(damaged)]) == 3
    assert "model.layers.2.mlp.down_proj.weight_scale differs from its digest" in capsys.readouterr().err


def test_one_flipped_bit_is_never_released_or_served(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped = Path(shutil.copytree(finished / "run" / "artifact", tmp_path / "flipped"))
    path = flipped / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    recipe = ["gate", str(finished / "recipe.yaml"), "--quiet", "--set", f"output={tmp_path / 'out'}"]
    assert cli.run([*recipe, "--artifact", str(flipped)]) == 4
    capsys.readouterr()
    assert cli.run(["serve", str(flipped), "--port", "0"]) == 4  # no verdict lies beside it
    assert "no verdict on these files" in capsys.readouterr().err
    assert cli.run(["serve", str(flipped), "--port", "0", "--allow-ungated"]) == 3
    assert "differs from its digest" in capsys.readouterr().err


def test_gating_another_folder_leaves_the_verdict_of_the_run_alone(finished: Path, tiny_llama: Path) -> None:
    before = (finished / "run" / "gate.json").read_bytes()
    assert cli.run(["gate", str(finished / "recipe.yaml"), "--artifact", str(tiny_llama), "--quiet"]) == 0
    assert (finished / "run" / "gate.json").read_bytes() == before


def test_an_old_verdict_never_stands_beside_a_new_artifact(
    make_project: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_project()
    run = ["run", str(folder / "recipe.yaml"), "--quiet"]
    assert cli.run(run) == 0

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("quantpipe.candidate.check_parity", interrupt)
        assert cli.run([*run, "--set", "quantize.scheme={name: w4a16, group_size: 32}"]) == 130
    assert not (folder / "run" / "gate.json").exists()
    assert not (folder / "run" / "report.md").exists()
    assert cli.run(run) == 0


def test_an_incomplete_artifact_is_refused_before_anything_is_measured(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(shutil.copytree(finished / "run" / "artifact", tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.3.self_attn.o_proj.weight_scale"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    for command in (
        ["verify", str(broken)],
        ["serve", str(broken), "--port", "0", "--allow-ungated"],
        ["gate", str(finished / "recipe.yaml"), "--artifact", str(broken), "--quiet"],
    ):
        assert cli.run(command) == 3
        lines = capsys.readouterr().err.strip().splitlines()
        assert any("model.layers.3.self_attn.o_proj.weight_scale is missing" in line for line in lines), command


def test_four_bits_with_gptq_make_an_artifact_and_a_verdict(make_project: Callable[[], Path], tmp_path: Path) -> None:
    folder = make_project()
    text = (folder / "recipe.yaml").read_text()
    set_folder = folder / "set"
    set_folder.mkdir()
    samples = [
        {"text": f"def f{n}(x):\n    return x[{n}] + {n}\n\n\nclass C{n}:\n    y = {n}\n" * 4} for n in range(40)
    ]
    (set_folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (set_folder / "set.yaml").write_text(
        "version: 1\nname: tiny\nsources:\n"
        "  - {kind: jsonl, path: samples.jsonl, fields: {text: text}, template: none}\n"
    )
    text = text.replace("solver: rtn", "solver: gptq").replace("scheme: w8a8", "scheme: {name: w4a16, group_size: 32}")
    text += "calibration: {set: set, num_sequences: 16, sequence_length: 128}\n"
    (folder / "recipe.yaml").write_text(text)
    assert cli.run(["run", str(folder / "recipe.yaml"), "--quiet"]) in (0, 4, 5)
    manifest = json.loads((folder / "run" / "artifact" / "quantpipe.json").read_text())
    assert manifest["calibration"]["num_sequences"] == 16
    assert all(0 < layer["error_after"] < 0.2 for layer in manifest["layers"])
    assert all(layer["damp_frac"] > 0 for layer in manifest["layers"])


def test_too_little_calibration_text_ends_with_3_and_writes_nothing(
    make_project: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project()
    (folder / "set").mkdir()
    rows = "".join(json.dumps({"text": f"value {n} = {n * n}"}) + "\n" for n in range(30))
    (folder / "set" / "samples.jsonl").write_text(rows)
    (folder / "set" / "set.yaml").write_text(
        "version: 1\nname: tiny\nsources:\n"
        "  - {kind: jsonl, path: samples.jsonl, fields: {text: text}, template: none}\n"
    )
    text = (folder / "recipe.yaml").read_text().replace("solver: rtn", "solver: gptq")
    (folder / "recipe.yaml").write_text(text + "calibration: {set: set, num_sequences: 16, sequence_length: 128}\n")
    assert cli.run(["run", str(folder / "recipe.yaml"), "--quiet"]) == 3
    error = capsys.readouterr().err
    assert "asked for 16 x 128 = 2,048 tokens" in error
    assert "Traceback" not in error
    assert not (folder / "run" / "artifact").exists()


def test_a_group_size_that_does_not_divide_ends_with_2_before_calibration(
    make_project: Callable[[], Path], random_llama: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project()
    model = random_llama(
        hidden_size=96, intermediate_size=96, head_dim=24, vocab_size=4096, max_position_embeddings=1024
    )
    tiny = Path(__file__).parents[1] / "fixtures" / "tiny_llama"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, model / name)
    sets = ["--set", f"model={model}", "--set", "engine.max_model_len=256"]
    arguments = ["run", str(folder / "recipe.yaml"), "--quiet", *sets]
    capsys.readouterr()  # what saving the model showed
    assert cli.run([*arguments, "--set", "quantize.scheme={name: w4a16, group_size: 64}"]) == 2
    error = capsys.readouterr().err.strip()
    assert "64 does not divide the 96 input features of model.layers.0.self_attn.q_proj" in error
    assert len(error.splitlines()) == 1
    assert not (folder / "run").exists()
