"""A candidate that is calibrated: what it depends on, what it records of its data, and what is refused before work."""

import heapq
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantpipe import candidate
from quantpipe.candidate import Candidate, make_candidate
from quantpipe.errors import DataError, RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.recipe.schema import Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

# `config` None: the runtime, which has tests of its own, serves nothing here.
Make = Callable[..., Candidate]
MIXED = {
    "allocate": {"scheme": {"name": "w8a16"}, "average_bits": 5.0, "num_tokens": 64},
}


def write_set(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    source = "  - kind: jsonl\n    path: rows.jsonl\n    fields: {text: text}\n"
    (folder / "set.yaml").write_text(f"version: 1\nname: tiny\nsources:\n{source}", encoding="utf-8")
    return folder


def paragraphs(*modules: Any) -> list[str]:
    return [
        part for m in modules for part in Path(m.__file__).read_text(encoding="utf-8").split("\n\n") if part.strip()
    ]


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    return write_set(tmp_path / "set", paragraphs(textwrap)[:60])


@pytest.fixture
def make(tiny_llama: Path, tmp_path: Path, calibration: Path, quiet: Reporter) -> Make:
    """Makes a candidate under ``output``, with fields of the calibration and quantize sections replaced."""
    base = BaseModel(tiny_llama, str(tiny_llama), Artifact.open(tiny_llama).digest, is_dequantized=False)

    def made(output: str = "run", asked: dict[str, Any] | None = None, **quantize: Any) -> Candidate:
        section = {"set": calibration, "num_sequences": 4, "sequence_length": 32} | (asked or {})
        method = {"solver": {"name": "gptq"}, "scheme": {"name": "w4a16", "group_size": 64}}
        recipe = {"version": 1, "name": "tiny", "model": {"source": str(tiny_llama)}, "calibration": section}
        rest = {"gate": {"mean_kl": {"max": 0.1}}, "output": tmp_path / output}
        parsed = Recipe.model_validate(recipe | rest | {"quantize": method | quantize})
        return make_candidate(parsed, base, None, quiet)

    return made


def manifest_of(candidate: Candidate) -> dict[str, Any]:
    assert candidate.artifact.manifest is not None
    return candidate.artifact.manifest


def test_changed_calibration_text_under_the_same_path_makes_a_new_artifact(make: Make, calibration: Path) -> None:
    first = make()
    first_digest = first.artifact.digest
    assert make().was_reused
    write_set(calibration, paragraphs(heapq)[:60])
    changed = make()
    assert not changed.was_reused
    assert changed.artifact.digest != first_digest


def test_coverage_is_reported_as_far_as_asked_for(make: Make, tmp_path: Path) -> None:
    files = {"coverage.json", "coverage.md", "coverage-text.png"}

    def written() -> set[str]:
        return {path.name for path in (tmp_path / "run").glob("coverage*")}

    make()
    assert written() == files
    assert make(asked={"coverage": "activations"}).was_reused  # what is said of the set changes no weight
    assert written() == files | {"coverage-saturation.png"}
    make(asked={"coverage": "none"})
    assert written() == set()


def test_documents_are_kept_apart_where_the_set_says_so(make: Make, calibration: Path) -> None:
    crossing = make()
    first = (calibration / "set.yaml").read_text(encoding="utf-8")
    (calibration / "set.yaml").write_text(f"{first}packing: separate\n", encoding="utf-8")
    separate = make()
    assert not separate.was_reused
    digests = [manifest_of(each)["calibration"]["digest"] for each in (crossing, separate)]
    assert digests[0] != digests[1]
    errors = [[layer["error_after"] for layer in manifest_of(each)["layers"]] for each in (crossing, separate)]
    assert errors[0] != errors[1]
    assert make().was_reused


def test_a_model_that_cannot_keep_documents_apart_is_refused_before_a_row_is_read(
    make: Make, calibration: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its masks are made without positions, as some models' are."""
    import transformers.models.llama.modeling_llama as modeling

    create = modeling.create_causal_mask
    blind = {"position_ids": None}
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **given: create(**(given | blind)))
    (calibration / "set.yaml").write_text(
        "version: 1\nname: tiny\npacking: separate\nsources: [{path: nowhere.jsonl, fields: {text: text}}]\n",
        encoding="utf-8",
    )
    with pytest.raises(RecipeError, match="packing 'separate': LlamaForCausalLM lets one document of a sequence reach"):
        make()
    assert not (tmp_path / "run" / "artifact").exists()


def test_too_few_samples_are_refused_before_anything_is_quantized(make: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"asked for 4000 x 32 = 128,000 tokens; the set has"):
        make(asked={"num_sequences": 4000})
    assert not (tmp_path / "run" / "artifact").exists()


def test_an_allowed_shortfall_is_counted_in_the_manifest(make: Make) -> None:
    recorded = manifest_of(make(asked={"num_sequences": 400, "allow_shortfall": True}))
    used = recorded["calibration"]["num_sequences"]
    assert 0 < used < 400
    assert recorded["calibration"]["num_sequences_asked"] == 400


def test_one_sentence_repeated_is_refused_before_anything_is_quantized(
    make: Make, calibration: Path, tmp_path: Path
) -> None:
    write_set(calibration, ["All our offices are closed on public holidays."] * 500)
    with pytest.raises(DataError, match=r"after dropping rows: 499 exact duplicate"):
        make()
    assert not (tmp_path / "run" / "artifact").exists()


def test_two_calibrated_runs_write_the_same_bytes(make: Make) -> None:
    first, second = (make(output, **MIXED).artifact for output in ("a", "b"))
    for path in sorted(first.folder.iterdir()):
        if path.name == "quantpipe.json":
            continue  # names the folders of this test; its tensors' digests are compared below
        assert path.read_bytes() == (second.folder / path.name).read_bytes(), path.name
    manifests = [artifact.manifest or {} for artifact in (first, second)]
    assert manifests[0]["tensors"] == manifests[1]["tensors"]
    assert manifests[0]["layers"] == manifests[1]["layers"]


QUANTIZE_IN_A_FRESH_PROCESS = """
import random, sys
import numpy as np
import torch

random.seed(1), np.random.seed(2), torch.manual_seed(3)
before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
from pathlib import Path
from quantpipe.pipeline import quantize_recipe
from quantpipe.recipe.schema import load_recipe
from quantpipe.report import Reporter

quantize_recipe(load_recipe(Path(sys.argv[1])), Path(sys.argv[2]), Reporter())
after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
changed = [name for name, b, a in zip(("random", "numpy", "torch"), before, after) if b != a]
assert not changed, changed
"""


def test_the_callers_random_states_are_left_by_a_whole_run(tiny_llama: Path, calibration: Path, tmp_path: Path) -> None:
    """In a process of its own, because libraries also draw when they are imported."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"version: 1\nname: tiny\nmodel: {tiny_llama}\n"
        f"calibration: {{set: {calibration}, num_sequences: 4, sequence_length: 32}}\n"
        "quantize: {transforms: [rotate], solver: {name: gptq}, scheme: {name: w4a16, group_size: 32}}\n"
        f"output: {tmp_path / 'run'}\n"
    )
    command = [sys.executable, "-c", QUANTIZE_IN_A_FRESH_PROCESS, str(recipe), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "artifact" / "quantpipe.json").is_file()


@pytest.mark.parametrize(
    "quantize",
    [
        {"scheme": {"name": "w3a16", "group_size": 32}},
        {"scheme": {"name": "w8a8"}},
        {
            "scheme": {"name": "w8a16"},
            "overrides": [{"modules": ["lm_head"], "scheme": {"name": "w8a16"}}],
            "ignore": [],
        },
    ],
    ids=["w3a16", "w8a8", "w8a16 with head"],
)
def test_what_transformers_reloads_computes_what_was_simulated(make: Make, quantize: dict[str, Any]) -> None:
    rows = {row.comparison: row for row in make(**quantize).parity}
    reloaded = rows["simulated, reloaded by transformers"]
    assert reloaded.agrees
    assert reloaded.found < 1e-5


def test_bits_given_by_sensitivity_are_on_record_and_reloaded_as_simulated(make: Make) -> None:
    candidate = make(**MIXED)
    recorded = manifest_of(candidate)
    upgraded = {name for choice in recorded["allocation"] if choice["is_upgraded"] for name in choice["modules"]}
    assert {name for name, scheme in candidate.artifact.schemes.items() if scheme.bits == 8} == upgraded
    assert 4.8 < recorded["average_bits"] <= 5.0
    assert all(choice["kl"] > 0 for choice in recorded["allocation"])
    assert all(row.agrees for row in candidate.parity)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_refusal_after_calibration_leaves_no_coverage_unless_the_run_can_go_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    def refuse(*_given: object) -> None:
        raise DataError("no space left on the disk" if is_full else "solver gptq: activations are not finite")

    monkeypatch.setattr(candidate, "quantize_model", refuse)
    with pytest.raises(DataError):
        make()
    left = {path.name for path in (tmp_path / "run").glob("coverage*")}
    assert left == ({"coverage.json", "coverage.md", "coverage-text.png"} if is_full else set())
