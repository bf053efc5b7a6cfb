"""``quantpipe gate``: a verdict on results that are stored, or on a folder; what a gate can decide; whether it notices
damage. Heavy imports inside."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantpipe.cache import cache_folder
from quantpipe.cli_options import open_reporter, optional_recipe_arguments, read_recipe
from quantpipe.errors import RecipeError

if TYPE_CHECKING:
    from quantpipe.gate.judge import GateResult


@click.command()
@optional_recipe_arguments
@click.option(
    "--artifact",
    type=click.Path(path_type=Path),
    help="Measure this model folder, quantized or ordinary, and judge it.",
)
@click.option("--power", is_flag=True, help="Judge nothing: show how many samples each limit needs to be decided.")
@click.option(
    "--self-test",
    "is_self_test",
    is_flag=True,
    help="Judge damaged copies, which must fail: of RECIPE's artifact, or of small ones made on the spot.",
)
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def gate(
    recipe: Path | None, overrides: Sequence[str], artifact: Path | None, power: bool, is_self_test: bool, quiet: bool
) -> int:
    """Judge the results of RECIPE's run once more, without a model: limits may have changed since.

    With --artifact: judge a model folder that exists already; the verdict goes to gate-<folder> under the output.
    """
    if is_self_test:
        return _self_test(recipe, overrides, artifact, power, quiet)
    if recipe is None:
        raise click.UsageError("Missing argument 'RECIPE'")
    if power:
        if artifact is not None:
            raise RecipeError("--power: looks at RECIPE alone; leave --artifact out")
        return _show_power(recipe, overrides)
    if artifact is None:
        return _gate_stored(recipe, overrides)
    loaded = read_recipe(recipe, overrides)
    reporter = open_reporter(quiet)
    from quantpipe.pipeline import gate_artifact, gate_folder

    result = gate_artifact(loaded, recipe, artifact, cache_folder(), reporter)
    return show_verdict(result, gate_folder(loaded, artifact))


def _self_test(recipe: Path | None, overrides: Sequence[str], artifact: Path | None, power: bool, quiet: bool) -> int:
    if power:
        raise RecipeError("--self-test: judges, and --power does not; give one of them")
    if recipe is None and (artifact is not None or overrides):
        raise click.UsageError("Missing argument 'RECIPE'")
    loaded = None if recipe is None else read_recipe(recipe, overrides, needs_gate=True)
    reporter = open_reporter(quiet)
    from quantpipe.controls.command import self_test

    return self_test(loaded, artifact, cache_folder(), reporter)


def _gate_stored(recipe: Path, overrides: Sequence[str]) -> int:
    from quantpipe.recipe.lines import naming_lines
    from quantpipe.recipe.schema import load_recipe
    from quantpipe.verdict.rejudge import rejudge

    loaded = load_recipe(recipe, overrides)
    with naming_lines(loaded):
        return show_verdict(rejudge(loaded), loaded.output)


def _show_power(recipe: Path, overrides: Sequence[str]) -> int:
    from quantpipe.recipe.lines import naming_lines
    from quantpipe.recipe.schema import load_recipe
    from quantpipe.verdict.power import power_lines, power_rows

    loaded = load_recipe(recipe, overrides)
    with naming_lines(loaded):
        click.echo(power_lines(power_rows(loaded)))
    return 0


def show_verdict(result: "GateResult", output: Path) -> int:
    """Print the checks and the verdict, and return the exit code."""
    from rich.console import Console

    from quantpipe.gate.report import render_table

    console = Console()
    console.print(render_table(result))
    console.print(f"{result.title}: report in {output / 'report.html'}", highlight=False, soft_wrap=True)
    return result.verdict.exit_code
