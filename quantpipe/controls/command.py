"""``quantpipe gate --self-test``: what the command does."""

from pathlib import Path

import click

from quantpipe.controls.on_recipe import self_test_of_recipe
from quantpipe.controls.on_the_spot import self_test_on_the_spot
from quantpipe.controls.self_test import summary
from quantpipe.errors import EXIT_CONTROLS, EXIT_PASS
from quantpipe.recipe.schema import Recipe
from quantpipe.report import Reporter


def self_test(recipe: Recipe | None, artifact: Path | None, cache_folder: Path, reporter: Reporter) -> int:
    """Run the controls and print what became of them; the exit code."""
    if recipe is None:
        rows = self_test_on_the_spot(reporter)
    else:
        rows = self_test_of_recipe(recipe, artifact, cache_folder, reporter)
    click.echo(summary(rows))
    return EXIT_PASS if all(row.is_well for row in rows) else EXIT_CONTROLS
