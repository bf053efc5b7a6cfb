"""``quantpipe calibrate``: build, inspect and compare calibration sets. Parses, makes one call, prints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from quantpipe.cache import cache_folder
from quantpipe.cli_options import open_reporter, recipe_arguments

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)


@click.group("calibrate")
def calibrate() -> None:
    """Build, inspect and compare calibration sets."""


def set_arguments(command: Command) -> Command:
    """Give a command its SET argument, what says which tokenizer reads it, and the budget."""
    for option in (
        click.option("--quiet", is_flag=True, help="Print results only."),
        click.option("--seed", type=click.IntRange(min=0), help="Which rows are drawn."),
        click.option("--sequence-length", type=click.IntRange(min=2), help="Tokens in each sequence."),
        click.option("--num-sequences", type=click.IntRange(min=1), help="How many sequences are built."),
        click.option("--model", metavar="MODEL", help="Whose tokenizer: a folder, a hub id, or as in recipes."),
        click.option("--recipe", type=PATH, help="Recipe with the model, the numbers and what is evaluated."),
        click.argument("calibration_set", metavar="[SET]", type=PATH, required=False),
    ):
        command = option(command)
    return command


@calibrate.command("build")
@set_arguments
@click.option("--allow-shortfall", is_flag=True, help="Take a set with too few tokens as far as it goes.")
@click.option("--out", type=PATH, help="Folder to write: the blocks and their manifest. Absent: nothing is written.")
def build_command(quiet: bool, out: Path | None, **asked: Any) -> None:
    """Build SET (its folder, or set.yaml) and print what became of every source. Absent: the set of the recipe.

    The folder written with --out can be `calibration.set` of a recipe.
    """
    reporter = open_reporter(quiet)
    from quantpipe.calibrate.commands import build_set
    from quantpipe.calibrate.plan import Asked

    click.echo(build_set(Asked(**asked), out, cache_folder(), reporter))


@calibrate.command("inspect")
@set_arguments
@click.option("--show", default=0, metavar="N", type=click.IntRange(min=0), help="Show N samples, always redacted.")
@click.option("--activations", is_flag=True, help="Run the model: does calibration cover held-out activations?")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect_command(quiet: bool, show: int, activations: bool, as_json: bool, **asked: Any) -> None:
    """Show what is in SET and what it covers. Without a model: rows and characters, no tokens. Writes nothing.

    A set with fewer tokens than asked is shown as far as it goes.
    """
    reporter = open_reporter(quiet)
    from quantpipe.calibrate.commands import inspect_set
    from quantpipe.calibrate.plan import Asked

    click.echo(inspect_set(Asked(**asked, allow_shortfall=True), show, activations, as_json, cache_folder(), reporter))


@calibrate.command("compare")
@recipe_arguments
@click.option("--sets", required=True, metavar="A,B", help="Folders of the sets, two or more.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(min=2), help="How many seeds.")
@click.option(
    "--on",
    "texts",
    multiple=True,
    metavar="LABEL=PATH",
    help="Held-out text of a domain, a file or a folder. May be repeated. Absent: the rows that the sets hold out.",
)
@click.option("--num-windows", default=16, show_default=True, type=click.IntRange(min=2), help="For each domain.")
@click.option("--window-tokens", default=256, show_default=True, type=click.IntRange(min=2))
@click.option("--quiet", is_flag=True, help="Print the table only.")
def compare_command(
    recipe: Path,
    overrides: Sequence[str],
    sets: str,
    seeds: int,
    texts: Sequence[str],
    num_windows: int,
    window_tokens: int,
    quiet: bool,
) -> None:
    """Quantize as RECIPE says with each set and seed; show mean KL per domain, and whether sets differ by more than the
    spread between seeds.

    Sets are relative to where the command runs. Everything is kept under `compare/` in the recipe's output, with
    comparison.json; what stands there already is not made again.
    """
    from quantpipe.recipe.schema import load_recipe

    loaded = load_recipe(recipe, overrides)
    reporter = open_reporter(quiet)
    from quantpipe.calibrate.compare.comparison import compare_sets
    from quantpipe.calibrate.compare.comparison_report import render_text
    from quantpipe.calibrate.compare.comparison_texts import Wanted

    folders = [Path(part.strip()) for part in sets.split(",") if part.strip()]
    wanted = Wanted(dict(map(_labelled, texts)), num_windows, window_tokens)
    click.echo(render_text(compare_sets(loaded, folders, seeds, wanted, cache_folder(), reporter)))


def _labelled(text: str) -> tuple[str, Path]:
    label, _, path = text.partition("=")
    if not label.strip() or not path.strip():
        raise click.BadParameter(f"found {text!r}; write LABEL=PATH, such as code=held_out/code.txt", param_hint="--on")
    return label.strip(), Path(path.strip())
