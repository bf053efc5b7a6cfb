"""The command ``rescore``: saved answers scored as the suite says now. Loads no model and no engine."""

from collections.abc import Sequence
from pathlib import Path

import click

from quantpipe.cli_options import open_reporter, read_recipe, recipe_arguments


@click.command()
@recipe_arguments
@click.option(
    "--outputs",
    type=click.Path(path_type=Path),
    help="Folder with the answers of both models. Default: the recipe's output.",
)
def rescore(recipe: Path, overrides: Sequence[str], outputs: Path | None) -> None:
    """Score the answers that a run of RECIPE saved as its suite says now; ask no model.

    Targets, tolerances and what answers are compared by may have changed since; prompts and choices may not. Judges
    nothing: the verdict of the run stays as it is.
    """
    loaded = read_recipe(recipe, overrides)
    reporter = open_reporter(quiet=False)
    from quantpipe.judgement import rescored

    click.echo("\n".join(rescored(loaded, outputs or loaded.output, reporter)))
