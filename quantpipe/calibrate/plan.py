"""What one ``quantpipe calibrate`` command is about: a set, a budget, a model, and what surrounds the build.

Put together from the command line, a recipe, and defaults, in this order of precedence. Light to import: models and
suites are opened only where a set or a recipe needs them.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from quantpipe.calibration import Budget, BuildContext, CalibrationSet, build_calibration
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import SetDefinition, set_in, set_of_recipe
from quantpipe.calibration.definition.sources import SelfSource
from quantpipe.calibration.readers.files import require_files
from quantpipe.calibration.samples.self_text import WriteText
from quantpipe.calibration.stored.built import read_built
from quantpipe.errors import RecipeError
from quantpipe.recipe.schema import CalibrationSection, ModelSection, Origin, Recipe, load_recipe
from quantpipe.report import Reporter

if TYPE_CHECKING:
    from quantpipe.sources.base_model import BaseModel


@dataclass(frozen=True)
class Asked:
    """What the command line says; None where it says nothing and the recipe, or a default, does."""

    calibration_set: Path | None = None
    recipe: Path | None = None
    model: str | None = None
    num_sequences: int | None = None
    sequence_length: int | None = None
    seed: int | None = None
    allow_shortfall: bool = False


@dataclass(frozen=True)
class Plan:
    """A checked set with all that a build of it needs. ``model`` None: there is no tokenizer."""

    definition: SetDefinition | Path
    section: CalibrationSection
    model: ModelSection | None
    recipe: Recipe | None
    cache_folder: Path

    @property
    def is_self_written(self) -> bool:
        """Whether a source of the set is text that the model writes."""
        return isinstance(self.definition, SetDefinition) and any(
            isinstance(source, SelfSource) for source in self.definition.sources
        )

    @property
    def budget(self) -> Budget:
        return Budget(self.section.num_sequences, self.section.sequence_length)

    def resolve_base(self) -> "BaseModel":
        """The whole base model. Raises RecipeError where none was named."""
        from quantpipe.sources.base_model import resolve_model

        return resolve_model(self._require_model(), self._folder, self.cache_folder)

    def tokenizer_folder(self) -> Path:
        """A folder with the tokenizer; no weights are fetched for it where they are a separate file."""
        from quantpipe.sources.base_model import resolve_tokenizer

        return resolve_tokenizer(self._require_model(), self._folder, self.cache_folder)

    @contextmanager
    def context(self, reporter: Reporter) -> Iterator[BuildContext]:
        """What surrounds a build; libraries cache in a temporary folder that goes when the build is done."""
        with tempfile.TemporaryDirectory(prefix="quantpipe-") as scratch:
            write = self._writer(reporter) if self.is_self_written else None
            yield BuildContext(Path(scratch), self._eval_texts(write), self.section.on_leakage, write)

    def _writer(self, reporter: Reporter) -> WriteText:
        from quantpipe.calibrate.self_text.own_texts import own_texts
        from quantpipe.engine.config import EngineConfig
        from quantpipe.judgement import engine_config

        config = EngineConfig() if self.recipe is None else engine_config(self.recipe)
        output = self.cache_folder if self.recipe is None else self.recipe.output
        return own_texts(self.resolve_base(), config, output, reporter)

    def _eval_texts(self, write: WriteText | None) -> tuple[EvalText, ...]:
        """What the recipe evaluates on, with the rows that this set holds out where it evaluates on those."""
        if self.recipe is None or self.recipe.evaluate is None:
            return ()
        from quantpipe.judgement import read_texts

        recipe = self.recipe.model_copy(update={"calibration": self.section})
        return read_texts(recipe, self.tokenizer_folder(), write)

    @property
    def _folder(self) -> Path:
        return self.recipe.folder if self.recipe is not None else Path.cwd()

    def _require_model(self) -> ModelSection:
        if self.model is None:
            raise RecipeError("calibrate: whose tokens? give --model, or --recipe with its model")
        return self.model


def plan_of(asked: Asked, cache_folder: Path) -> Plan:
    """Read the recipe and the set. Raises RecipeError and DataError for either, and where no set is named."""
    recipe = load_recipe(asked.recipe) if asked.recipe is not None else None
    section = recipe.calibration if recipe is not None else None
    numbers = {key: getattr(asked, key) for key in ("num_sequences", "sequence_length", "seed")}
    changes = {key: value for key, value in numbers.items() if value is not None}
    if asked.allow_shortfall:
        changes["allow_shortfall"] = True
    if asked.calibration_set is not None:
        definition: SetDefinition | Path = set_in(asked.calibration_set)
        changes["set"] = asked.calibration_set
    elif recipe is not None:
        definition = set_of_recipe(recipe)
    else:
        raise RecipeError("calibrate: no set; give its folder or set.yaml, or --recipe with a calibration section")
    if isinstance(definition, SetDefinition):
        require_files(definition)
    if section is None:
        section = CalibrationSection.model_validate({"set": asked.calibration_set, **changes})
    else:
        section = section.model_copy(update=changes)
    model = _named_model(asked.model) if asked.model is not None else recipe.model if recipe is not None else None
    return Plan(definition, section, model, recipe, cache_folder)


def build_plan(plan: Plan, reporter: Reporter) -> CalibrationSet:
    """Build the set of a plan, or read its blocks, with notes and progress to the reporter."""
    folder, section = plan.tokenizer_folder(), plan.section
    if not isinstance(plan.definition, SetDefinition):
        return read_built(plan.definition, folder)
    reporter.stage(f"calibrate: {section.num_sequences} x {section.sequence_length} tokens of {section.set_name}")
    with plan.context(reporter) as context:
        calibration = build_calibration(
            plan.definition,
            folder,
            plan.budget,
            section.seed,
            section.allow_shortfall,
            reporter.progress,
            context,
        )
    for note in calibration.notes:
        reporter.note(note)
    return calibration


def _named_model(text: str) -> ModelSection:
    try:
        return ModelSection.model_validate({"source": text}, context=Origin(Path.cwd(), "", ()))
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise RecipeError(f"--model: {reason}") from error
