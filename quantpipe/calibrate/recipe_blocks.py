"""The calibration blocks that a recipe asks for: built from its set, or read where they were built before.

What the recipe evaluates on is compared with every row, and what became of the rows is told as a table.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quantpipe.calibrate.self_text.own_texts import own_texts
from quantpipe.calibration import Budget, BuildContext, CalibrationSet, account_table, build_calibration
from quantpipe.calibration.checks.leakage import MOST_SHOWN, EvalText
from quantpipe.calibration.definition.set_definition import MANIFEST_NAME, set_of_recipe
from quantpipe.calibration.stored.built import built_budget, equal_rows, read_built, read_manifest
from quantpipe.calibration.stored.manifest import evaluation_digest, manifest_text
from quantpipe.disk import removing_empty
from quantpipe.errors import DataError, RecipeError
from quantpipe.gate.record import write_text_atomically
from quantpipe.judgement import engine_config
from quantpipe.recipe.quantize_rules import reads_data
from quantpipe.recipe.schema import CalibrationSection, Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

CACHE_FOLDER = "calibration-cache"


def calibrate(recipe: Recipe, base: BaseModel, texts: Sequence[EvalText], reporter: Reporter) -> CalibrationSet | None:
    """The blocks of a recipe, None where nothing in it calibrates; ``texts`` is what it evaluates on.

    Raises RecipeError and DataError where the set or the recipe is wrong, has too few tokens, or overlaps ``texts``.
    """
    section = recipe.calibration
    if section is None or not reads_data(recipe.model_dump(mode="json")):  # a set may serve the evaluation alone
        return None
    definition, budget = set_of_recipe(recipe), budget_of(recipe)
    reporter.stage(f"calibrate: {budget.num_sequences} x {budget.sequence_length} tokens of {section.set_name}")
    if isinstance(definition, Path):
        calibration = read_built(definition, base.folder)
        reporter.note(f"blocks as they lie in {definition}")
        _check_built(definition, calibration, texts, reporter)
    else:
        with build_context(recipe, base, texts, reporter) as context:
            calibration = build_calibration(
                definition, base.folder, budget, section.seed, section.allow_shortfall, reporter.progress, context
            )
    for line in account_table(calibration.account).splitlines():
        reporter.note(line)
    for note in calibration.notes:
        reporter.note(note)
    return calibration


def budget_of(recipe: Recipe) -> Budget:
    """How much a recipe calibrates on. Raises RecipeError where blocks that were built before are not of that size."""
    section = recipe.calibration
    if section is None:
        return Budget(0, 1)
    folder = set_of_recipe(recipe)
    if not isinstance(folder, Path):
        return Budget(section.num_sequences, section.sequence_length)
    budget = built_budget(folder)
    _require_same(section, "num_sequences", section.num_sequences, budget.num_sequences, folder)
    _require_same(section, "sequence_length", section.sequence_length, budget.sequence_length, folder)
    _require_same(section, "seed", section.seed, read_manifest(folder)["seed"], folder)
    return budget


def is_packed_apart(recipe: Recipe) -> bool:
    """Whether documents of one sequence must not attend to each other."""
    if recipe.calibration is None:
        return False
    definition = set_of_recipe(recipe)
    if isinstance(definition, Path):
        return bool(read_manifest(definition)["packing"] == "separate")
    return definition.header.packing == "separate"


@contextmanager
def build_context(
    recipe: Recipe, base: BaseModel, texts: Sequence[EvalText], reporter: Reporter
) -> Iterator[BuildContext]:
    """What surrounds a build of the recipe's set. Caches of libraries lie in its output, and are gone afterwards."""
    with removing_empty(recipe.output):
        yield from _context(recipe, base, texts, reporter)


def _context(recipe: Recipe, base: BaseModel, texts: Sequence[EvalText], reporter: Reporter) -> Iterator[BuildContext]:
    cache = recipe.output / CACHE_FOLDER
    shutil.rmtree(cache, ignore_errors=True)  # of a run that was killed
    cache.mkdir(parents=True)
    write = own_texts(base, engine_config(recipe), recipe.output, reporter)
    on_leakage = recipe.calibration.on_leakage if recipe.calibration is not None else "refuse"
    try:
        yield BuildContext(cache, tuple(texts), on_leakage, write)
    finally:
        write.close()
        shutil.rmtree(cache, ignore_errors=True)


def write_manifest(output: Path, calibration: CalibrationSet) -> None:
    """Write the manifest of the blocks beside the verdict."""
    write_text_atomically(output / MANIFEST_NAME, manifest_text(calibration.manifest))


def _check_built(folder: Path, calibration: CalibrationSet, texts: Sequence[EvalText], reporter: Reporter) -> None:
    """Raise DataError where built blocks hold an evaluation text; their rows are gone, so only equal ones are found."""
    if evaluation_digest(texts) in (None, calibration.manifest["evaluation_sha256"]):
        return
    found = list(equal_rows(calibration.manifest, texts))
    if found:
        shown = ", ".join(f"{where} = {text.set}:{text.row}" for where, text in found[:MOST_SHOWN])
        rows = "1 row is an evaluation text" if len(found) == 1 else f"{len(found)} rows are evaluation texts"
        raise DataError(f"{folder}: {rows}: {shown}; build the set again for this recipe")
    reporter.note(
        "the blocks were not compared with what this recipe evaluates on, but for equal texts; "
        "`quantpipe calibrate build --recipe` does"
    )


def _require_same(section: CalibrationSection, key: str, asked: int, there: int, folder: Path) -> None:
    if key in section.model_fields_set and asked != there:
        raise RecipeError(
            f"calibration.{key}: found {asked}, the blocks in {folder} were built with {there}; leave it out, or build "
            "the set again"
        )
