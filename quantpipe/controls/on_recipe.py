"""The controls on a recipe's own artifact, judged by the recipe's own gate."""

import tempfile
from pathlib import Path

from quantpipe.controls.self_test import ControlRow, Judged, itself_row, run_controls
from quantpipe.errors import ArtifactError, RecipeError
from quantpipe.formats.artifact import Artifact
from quantpipe.gate.metrics import concurrency_of
from quantpipe.gate.record import ARTIFACT_FOLDER
from quantpipe.judgement import judge_candidate
from quantpipe.models import describe
from quantpipe.pipeline import questions_of, resolve_served
from quantpipe.recipe.lines import naming_lines
from quantpipe.recipe.schema import NO_ARCHIVE, Recipe
from quantpipe.report import Reporter
from quantpipe.verdict.stored import read_results


def self_test_of_recipe(
    recipe: Recipe, artifact: Path | None, cache_folder: Path, reporter: Reporter
) -> list[ControlRow]:
    """Base against itself, then every control on the artifact; None: the one under the recipe's output.

    Nothing is timed, and limits on times do not count: what is tested is the evaluation. Verdicts go to a temporary
    folder. RecipeError where no limit is on what is evaluated, ArtifactError where there is no artifact.
    """
    recipe.require_gate()
    evaluated = evaluated_alone(recipe)
    folder = recipe.output / ARTIFACT_FOLDER if artifact is None else artifact
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder; run the recipe first, or name an artifact with --artifact")
    with naming_lines(recipe):
        base = resolve_served(evaluated, cache_folder, reporter)
        describe(Artifact.open(folder))
        questions = questions_of(evaluated, base, reporter)
    with tempfile.TemporaryDirectory(prefix="quantpipe-") as scratch_name:
        scratch = Path(scratch_name)
        output = scratch / "verdict"

        def judge(judged: Path) -> Judged:
            result = judge_candidate(evaluated, base, judged, questions, (), (), (), output, reporter, cache_folder)
            return Judged(result, read_results(output).results.comparison)

        reporter.stage("base model against itself")
        itself = itself_row(judge, base.folder)
        return [itself, *run_controls(str(folder), folder, judge, scratch / "damaged", reporter)]


def evaluated_alone(recipe: Recipe) -> Recipe:
    """The recipe without its bench, without limits on what that measures, and without an archive."""
    if all(concurrency_of(entry.figure) is not None for entry in recipe.limits):
        raise RecipeError(
            "gate: every limit is on a time, so nothing tells a damaged model from a sound one; add a limit on mean_kl"
        )
    if isinstance(recipe.gate, dict):
        named = {name: limit for name, limit in recipe.gate.items() if concurrency_of(name) is None}
        return recipe.model_copy(update={"bench": None, "gate": named, "archive": NO_ARCHIVE})
    entries = tuple(entry for entry in recipe.gate if concurrency_of(entry.figure) is None)
    return recipe.model_copy(update={"bench": None, "gate": entries, "archive": NO_ARCHIVE})
