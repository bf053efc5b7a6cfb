"""Options and start-up that commands share. Everything heavy is imported inside."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from quantpipe.recipe.schema import Recipe
    from quantpipe.report import Reporter

Command = TypeVar("Command", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """click's range, which lets "nan" in, without it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Fails where ``value`` is no number in the range."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


def recipe_arguments(command: Command) -> Command:
    """Give a command its RECIPE argument and the ``--set`` option."""
    return _with_recipe(command, is_required=True)


def optional_recipe_arguments(command: Command) -> Command:
    """The same for a command that also works without a recipe."""
    return _with_recipe(command, is_required=False)


def _with_recipe(command: Command, is_required: bool) -> Command:
    option = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY.PATH=VALUE",
        help="Replace or add one value of the recipe; read as YAML, paths relative to the recipe. May be repeated.",
    )
    argument = click.argument("recipe", type=click.Path(path_type=Path), required=is_required)
    return argument(option(command))


def read_recipe(path: Path, overrides: Sequence[str], needs_gate: bool = False) -> "Recipe":
    """The recipe, checked together with the calibration set that it names or holds: no row is read."""
    from quantpipe.recipe.schema import load_recipe

    recipe = load_recipe(path, overrides)
    if needs_gate:  # before anything heavy is imported
        recipe.require_gate()
    if recipe.calibration is not None:
        from quantpipe.calibration.definition.set_definition import SetDefinition, set_of_recipe
        from quantpipe.calibration.readers.files import require_files

        definition = set_of_recipe(recipe)
        if isinstance(definition, SetDefinition):
            require_files(definition)
    return recipe


def open_reporter(quiet: bool) -> "Reporter":
    """A reporter, with the libraries' own bars and log lines turned off: ours say the same."""
    from transformers.utils import logging

    from quantpipe.report import Reporter

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return Reporter(quiet)


def naming_options(flags: Collection[str]) -> AbstractContextManager[None]:
    """A context in which refusals call a setting of the engine by the option that it was given with."""
    from quantpipe.engine.setting_names import calling_settings

    return calling_settings(lambda name: f"--{name.replace('_', '-')}" if name in flags else f"--engine {name}")


def read_settings(options: Sequence[str], flags: Collection[str]) -> dict[str, Any]:
    """What ``--engine KEY=VALUE`` options say, values read as YAML. RecipeError for one that has a flag of its own."""
    import yaml

    from quantpipe.errors import RecipeError

    settings: dict[str, Any] = {}
    for option in options:
        name, separator, text = option.partition("=")
        if not separator or not name:
            raise RecipeError(f"--engine: '{option}' is not KEY=VALUE")
        if name in flags:
            raise RecipeError(f"--engine: {name} has an option of its own, --{name.replace('_', '-')}")
        if name in settings:
            raise RecipeError(f"--engine: {name} is given twice")
        try:
            settings[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise RecipeError(f"--engine: the value of {name}, '{text}', cannot be read") from None
    return settings


def engine_option(command: Command) -> Command:
    """Give a command the ``--engine KEY=VALUE`` option, as ``engine_settings``."""
    return click.option(
        "--engine",
        "engine_settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other setting of the engine, such as max_prefill_chunk=128 (docs/serving.md). May be repeated.",
    )(command)
