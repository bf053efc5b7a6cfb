"""The controls on small artifacts of every kind, made on the spot: needs no model, no data and no network."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from quantpipe.controls.self_test import ControlRow, Judge, Judged, itself_row, run_controls
from quantpipe.controls.tiny_model import KINDS, Kind, windows_of, write_base, write_kind
from quantpipe.evaluate.suite import Suite, load_suite
from quantpipe.formats.artifact import Artifact
from quantpipe.judgement import Questions, judge_candidate
from quantpipe.recipe.schema import Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel
from quantpipe.verdict.stored import read_results

NUM_ITEMS = 24
_SUITE = {"version": 1, "name": "tiny", "tasks": [{"task": "next_word", "metric": "acc", "num_items": NUM_ITEMS}]}
_TASK = {
    "task": "next_word",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "items.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "prompt",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def self_test_on_the_spot(reporter: Reporter, kinds: Mapping[str, Kind] = KINDS) -> list[ControlRow]:
    """Base against itself with a small suite, then every control on every kind."""
    with tempfile.TemporaryDirectory(prefix="quantpipe-") as scratch_name:
        scratch, quiet = Path(scratch_name), Reporter(quiet=True)
        folder = write_base(scratch / "base")
        base = BaseModel(folder, "a small random model", Artifact.open(folder).digest, is_dequantized=False)
        reporter.stage("base model against itself")
        rows = [itself_row(_judge(base, 0.0, scratch, quiet, write_suite(scratch / "suite")), folder)]
        for number, (name, kind) in enumerate(kinds.items()):
            artifact = write_kind(kind, folder, scratch / f"artifact-{number}")
            judge = _judge(base, kind.max_kl, scratch, quiet)
            rows += run_controls(name, artifact, judge, scratch / f"damaged-{number}", reporter)
        return rows


def _judge(base: BaseModel, max_kl: float, scratch: Path, reporter: Reporter, suite: Suite | None = None) -> Judge:
    gate = {"mean_kl": {"max": max_kl}} | ({} if suite is None else {"accuracy_loss_points": {"max": 100.0}})
    recipe = Recipe.model_validate(
        {
            "version": 1,
            "name": "controls",
            "model": {"source": str(base.folder)},
            "engine": {"num_threads": 1, "max_model_len": 128},
            "gate": gate,
            "output": scratch / "verdict",
            "archive": "none",
        }
    )
    questions = Questions(suite, windows_of(base.folder))

    def judge(folder: Path) -> Judged:
        result = judge_candidate(
            recipe, base, folder, questions, (), (), (), recipe.output, reporter, scratch / "cache"
        )
        return Judged(result, read_results(recipe.output).results.comparison)

    return judge


def write_suite(folder: Path) -> Suite:
    """Items that the model can only guess: what is tested is that it guesses the same twice."""
    folder.mkdir()
    words = ("if", "return", "self", "the")
    rows = (
        {"id": f"item-{n}", "domain": "code", "cluster": f"cluster-{n}", "label": n % 4}
        | {"prompt": f"{n}: {words[n % 3]} ", "choices": words}
        for n in range(NUM_ITEMS)
    )
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "suite.yaml").write_text(json.dumps(_SUITE))  # JSON is YAML
    (folder / "task.yaml").write_text(json.dumps(_TASK))
    return load_suite(folder)
