"""Judging the stored results of a run once more, by the recipe as it is now: limits may have changed, nothing else may.

Imports nothing that runs a model, and takes milliseconds.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from quantpipe.cache import cache_folder
from quantpipe.errors import DataError, RecipeError
from quantpipe.evaluate.comparison import Comparison
from quantpipe.evaluate.items import ItemResult
from quantpipe.evidence.item_flips import flip_rows
from quantpipe.formats.digests import artifact_digest, file_stamps, tree_digest
from quantpipe.gate.judge import GateResult, Verdict
from quantpipe.gate.record import (
    ARTIFACT_FOLDER,
    GATE_NAME,
    read_gate_json,
    utc_now,
    write_gate_json,
)
from quantpipe.recipe.schema import Recipe
from quantpipe.releases.archive import Release, add_release
from quantpipe.reporting.paths import roots_of, without_paths
from quantpipe.reporting.report import report_of
from quantpipe.reporting.sections.suite import suite_section
from quantpipe.reporting.writing import write_report
from quantpipe.verdict.results import Results, judge_results, limit_path
from quantpipe.verdict.score_rows import score_rows
from quantpipe.verdict.stored import Source, StoredRun, read_results

# What decides what a run measures. Paths are left out: what lies there is compared instead.
SECTIONS = ("model", "calibration", "quantize", "engine", "evaluate", "bench")
AGAIN = "so run the recipe again"


def source_of(recipe: Recipe, artifact: Path) -> Source:
    """What results of a recipe's run would be of, as everything lies now. DataError where something is not there."""
    evaluate = recipe.evaluate
    text = evaluate.divergence.text if evaluate is not None and evaluate.divergence is not None else None
    return Source(
        sections={name: _section_digest(recipe, name) for name in SECTIONS},
        suite_files="" if evaluate is None else tree_digest(evaluate.suite),
        text_files="" if text is None else tree_digest(text),
        stamps=file_stamps(artifact),
    )


def _section_digest(recipe: Recipe, name: str) -> str:
    section = getattr(recipe, name)
    left_out = {"suite": True, "divergence": {"text": True}} if name == "evaluate" else {}
    dumped = None if section is None else section.model_dump(mode="json", exclude=left_out)
    return hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()


def rejudge(recipe: Recipe) -> GateResult:
    """Judge what is stored under ``recipe.output`` of the artifact there; write ``gate.json`` and the report anew.

    RecipeError without limits, for limits on what no item has, and for a limit on what was not measured. DataError
    where the results are missing, or of anything else than the recipe, the artifact and the evals as they are now.
    """
    recipe.require_gate()
    artifact = recipe.output / ARTIFACT_FOLDER
    run = read_results(recipe.output)
    _require_fit(recipe, artifact, run)
    results = with_previous(recipe, run.results)
    _require_measured(recipe, results)
    result = judge_results(recipe, results)
    context = replace(run.parts.context, recipe_name=recipe.name, recipe_digest=recipe.digest, date=utc_now())
    write_verdict(recipe, recipe.output, result, replace(run, parts=replace(run.parts, context=context)))
    return result


def write_verdict(recipe: Recipe, output: Path, result: GateResult, run: StoredRun) -> Release | None:
    """Write ``gate.json`` and the report under ``output``, and keep it in the recipe's archive, if it has one.

    DataError if the disk refuses.
    """
    parts, comparison = run.parts, run.results.comparison
    suite = (
        suite_section(())
        if comparison is None
        else suite_section(score_rows(comparison, recipe.limits), flip_rows(comparison))
    )
    text = "\n".join((recipe.source_text.rstrip(), *(f"# --set {each}" for each in recipe.overrides))).strip()
    sections = (suite, *parts.sections)
    report = report_of(result, parts.context, parts.notes, sections, parts.data, text, parts.commands)
    report = without_paths(report, roots_of(recipe.output, cache_folder()))
    write_gate_json(output / GATE_NAME, result, parts.context)
    write_report(output, report)
    archive = recipe.archive_folder
    return None if archive is None else add_release(archive, report, output)


def _require_fit(recipe: Recipe, artifact: Path, run: StoredRun) -> None:
    now, then = source_of(recipe, artifact), run.source
    for name in SECTIONS:
        if now.sections[name] != then.sections.get(name):
            raise RecipeError(f"{name}: changed since the results in {recipe.output} were measured, {AGAIN}")
    if now.suite_files != then.suite_files:
        raise DataError(f"evaluate.suite: changed since the results in {recipe.output} were measured, {AGAIN}")
    if now.text_files != then.text_files:
        text = f"changed since the results in {recipe.output} were measured"
        raise DataError(f"evaluate.divergence.text: {text}, {AGAIN}")
    if now.stamps != then.stamps and artifact_digest(artifact) != run.parts.context.artifact_digest:
        raise DataError(f"{artifact}: is not the artifact that the results in {recipe.output} are of, {AGAIN}")


def _require_measured(recipe: Recipe, results: Results) -> None:
    for number, entry in enumerate(recipe.limits):
        if results.measure(entry) == "not measured":
            where = limit_path(recipe, number, "metric")
            raise RecipeError(f"{where}: {entry.label} was not measured when the recipe ran, {AGAIN}")


def read_previous(recipe: Recipe) -> tuple[ItemResult, ...]:
    """What the candidate of ``recipe.previous_release`` made of its suite; nothing where a recipe names none.

    DataError where that folder holds no release that passed.
    """
    folder = recipe.previous_release
    if folder is None:
        return ()
    try:
        verdict, context = read_gate_json(folder / GATE_NAME)
        before = read_results(folder)
    except DataError as error:
        raise DataError(f"previous_release: {error}") from error
    if verdict.verdict is not Verdict.PASS:
        raise DataError(f"previous_release: the verdict in {folder} is {verdict.title}; give a release that passed")
    if before.parts.context.artifact_digest != context.artifact_digest:
        raise DataError(f"previous_release: the results in {folder} are not of the artifact that passed; run it again")
    return () if before.results.comparison is None else tuple(cand for _, cand in before.results.comparison.pairs)


def with_previous(recipe: Recipe, results: Results) -> Results:
    """``results`` with the items of the earlier release beside those of the candidate, where the recipe names one.

    DataError where that was not asked exactly the same (and as ``read_previous``).
    """
    folder = recipe.previous_release
    if folder is None or results.comparison is None:
        return results
    known = {(item.task, item.doc_id): item for item in read_previous(recipe)}
    pairs = []
    for _, cand in results.comparison.pairs:
        earlier = known.get((cand.task, cand.doc_id))
        if earlier is None or earlier.prompt_digest != cand.prompt_digest:
            what = "has no result of" if earlier is None else "was given other prompt tokens for"
            raise DataError(
                f"previous_release: {folder} {what} item {cand.task}/{cand.doc_id}; judge that artifact by this "
                "recipe's suite first (quantpipe gate --artifact)"
            )
        pairs.append((earlier, cand))
    return replace(results, previous=Comparison(tuple(pairs)))
