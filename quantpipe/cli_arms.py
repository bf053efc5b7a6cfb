"""What ``quantpipe serve`` takes for two artifacts: how requests divide between them, or that one is a shadow."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantpipe.cli_options import NumberRange

if TYPE_CHECKING:
    from quantpipe.serve.arms.split import Split
    from quantpipe.serve.shadow.options import ShadowOptions

MAX_ARMS = 2

ARM_OPTIONS = (
    click.option(
        "--split",
        metavar="WEIGHTS",
        help="Of two artifacts: how requests divide between them, such as 90:10. A user stays with one.",
    ),
    click.option("--split-seed", type=int, help="Another one divides users and draws otherwise. Default: 0."),
    click.option(
        "--shadow", is_flag=True, help="Of two artifacts: the second answers too, is compared, and is heard by nobody."
    ),
    click.option(
        "--shadow-share",
        type=NumberRange(0, 1, min_open=True),
        help="The share of requests that the shadow answers. Default: 1, all.",
    ),
    click.option(
        "--shadow-max-open",
        type=click.IntRange(min=1),
        help="Most choices that the shadow works on; requests beyond that it does not see. Default: 16.",
    ),
)


def take_arms(values: dict[str, Any]) -> tuple["Split | None", "ShadowOptions | None"]:
    """Take the options of arms out of ``values`` of a command that has ``artifacts``; None, None where there is one.

    Raises UsageError where they do not fit each other, RecipeError where a split is none.
    """
    from quantpipe.serve.arms.split import Split
    from quantpipe.serve.shadow.options import ShadowOptions

    artifacts: tuple[Path, ...] = values["artifacts"]
    split, seed, is_shadowed = values.pop("split"), values.pop("split_seed"), values.pop("shadow")
    share, max_open = values.pop("shadow_share"), values.pop("shadow_max_open")
    asked = {"--split": split, "--shadow": is_shadowed or None, "--split-seed": seed}
    asked |= {"--shadow-share": share, "--shadow-max-open": max_open}
    given = [name for name, value in asked.items() if value is not None]
    if len(artifacts) > MAX_ARMS:
        raise click.UsageError(f"{len(artifacts)} artifacts were given; serve one, or two with --split or --shadow")
    if len(artifacts) == 1:
        if given:
            raise click.UsageError(f"{given[0]} is for two artifacts, and one was given; give another, or leave it out")
        return None, None
    if (split is not None) == is_shadowed:
        found = "both were" if is_shadowed else "neither was"
        raise click.UsageError(f"two artifacts need either --split, such as 90:10, or --shadow; {found} given")
    if is_shadowed:
        default = ShadowOptions()
        share, max_open = share or default.share, max_open or default.max_open
        return None, ShadowOptions(share, max_open, seed or default.seed)
    for name in ("--shadow-share", "--shadow-max-open"):
        if name in given:
            raise click.UsageError(f"{name} is for --shadow, and --split was given; leave it out")
    return Split.parse(split, len(artifacts), seed or 0), None
