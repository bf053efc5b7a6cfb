"""The ``compare`` command: releases beside each other, or over time. Everything heavy is imported inside."""

from pathlib import Path

import click

PATH = click.Path(path_type=Path)
DEFAULT_ARCHIVE = Path("runs") / "archive"
TREND_NAME = "trend.html"


@click.command()
@click.argument("releases", nargs=-1, metavar="A B [C ...]")
@click.option(
    "--archive", type=PATH, default=DEFAULT_ARCHIVE, show_default=True, help="Where names of releases are looked up."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", "html_file", type=PATH, metavar="FILE", help="Write the comparison, with plots, to this file.")
@click.option("--trend", is_flag=True, help="Instead, all releases of an archive over time: --trend [ARCHIVE].")
def compare(releases: tuple[str, ...], archive: Path, as_json: bool, html_file: Path | None, trend: bool) -> None:
    """Put judged releases side by side: evals, fidelity, bench, memory, errors by layer, with their intervals.

    A, B: folders that `run` or `gate` wrote, gate.json or report.json files, or names in an archive (an id, the
    beginning of one, or a recipe's name for its latest release). B and those after it are held against A. What does not
    compare, as it is from another machine or another suite, is said and not compared.
    """
    from quantpipe.errors import RecipeError

    if trend:
        if len(releases) > 1 or as_json:
            raise RecipeError("compare: --trend takes one archive and no --json; give its folder")
        _print_trend(Path(releases[0]) if releases else archive, html_file)
        return
    if len(releases) < 2:
        raise RecipeError(f"compare: {len(releases)} given; give two releases or more, or --trend")
    from quantpipe.gate.record import write_text_atomically
    from quantpipe.releases.comparison import compare_releases
    from quantpipe.releases.comparison_files import comparison_html, comparison_json, comparison_markdown
    from quantpipe.releases.opened import open_releases

    opened = open_releases(releases, archive)
    comparison = compare_releases(opened)
    if html_file is not None:
        write_text_atomically(html_file, comparison_html(comparison))
    click.echo(comparison_json(comparison, opened) if as_json else comparison_markdown(comparison), nl=False)


def _print_trend(archive: Path, html_file: Path | None) -> None:
    from quantpipe.errors import DataError
    from quantpipe.gate.record import write_text_atomically
    from quantpipe.releases.archive import read_index
    from quantpipe.releases.trend import trend_html, trend_markdown

    releases, problems = read_index(archive)
    for problem in problems:
        click.echo(problem, err=True)
    if not releases:
        raise DataError(f"{archive}: no release is in its index; run a recipe first")
    path = html_file or archive / TREND_NAME
    write_text_atomically(path, trend_html(releases, problems))
    click.echo(trend_markdown(releases), nl=False)
    click.echo(f"plots: {path}")
