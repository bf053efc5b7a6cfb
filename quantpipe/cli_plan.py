"""The ``plan`` command: the sums before any work. Imports neither torch nor transformers, unless it validates."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from quantpipe.plan.devices import GivenSpeeds
    from quantpipe.plan.subject import Subject
    from quantpipe.plan.validate import ClockName

VALIDATED_CONCURRENCIES, VALIDATED_CONTEXTS = (1, 8), (128, 512)


@click.command()
@click.argument("subject", type=click.Path(path_type=Path))
@click.option("--gpu", "device", default="cpu", show_default=True, metavar="NAME", help="A100-80G, H100, H200, L4, ...")
@click.option("--bandwidth", type=float, metavar="GB/S", help="Speed of the device's memory, in place of the table's.")
@click.option("--flops", type=float, metavar="TFLOP/S", help="Dense rate of bfloat16 (on a CPU float32).")
@click.option("--memory", type=float, metavar="GB", help="Of the device.")
@click.option("--concurrency", "-c", default=8, show_default=True, type=click.IntRange(min=1), help="Sequences.")
@click.option("--context", type=click.IntRange(min=2), help="Tokens of each, prompt and output. Default: 4096 at most.")
@click.option("--scheme", metavar="NAME", help="Plan the weights in this scheme, such as 'w4a16 g64'.")
@click.option("--kv-dtype", metavar="MODE", help="A `kv_cache` of recipes. Default: as the recipe or artifact says.")
@click.option("--slo", default="", metavar="ttft_ms=..,tpot_ms=..", help="What replies may take at most.")
@click.option("--config", type=click.Path(path_type=Path), help="The base model's config.json, for a recipe.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Replace or add one value of the recipe."
)
@click.option("--json", "as_data", is_flag=True, help="Print data whose names end in their units.")
@click.option("--validate", is_flag=True, help="Open the model folder here and compare prediction and measurement.")
@click.option(
    "--clock",
    default="wall",
    show_default=True,
    type=click.Choice(["wall", "cpu"]),
    help="What --validate times by: cpu is one thread's processor time, for a machine that is not idle.",
)
def plan(
    subject: Path,
    device: str,
    bandwidth: float | None,
    flops: float | None,
    memory: float | None,
    concurrency: int,
    context: int | None,
    scheme: str | None,
    kv_dtype: str | None,
    slo: str,
    config: Path | None,
    overrides: tuple[str, ...],
    as_data: bool,
    validate: bool,
    clock: "ClockName",
) -> None:
    """What SUBJECT (a recipe, model folder or config.json) takes and gives on a device; loads no weights."""
    import json

    from quantpipe.cache import cache_folder
    from quantpipe.plan.devices import OPTION_UNITS, GivenSpeeds, find_device
    from quantpipe.plan.memory import Load
    from quantpipe.plan.plan import make_plan
    from quantpipe.plan.record import as_json
    from quantpipe.plan.slo import parse_slo
    from quantpipe.plan.subject import changed, default_context, read_subject
    from quantpipe.plan.text import render

    wanted = parse_slo(slo)
    numbers = {"bandwidth": bandwidth, "flops": flops, "memory": memory}
    given = GivenSpeeds(*(_times(value, OPTION_UNITS[option][1]) for option, value in numbers.items()))
    found = changed(read_subject(subject, overrides, config, cache_folder()), scheme, kv_dtype)
    if validate:
        _validate(subject, found, given, device, clock)
        return
    load = Load(concurrency, context or default_context(found.shape), found.kv_dtype)
    made = make_plan(found, find_device(device, given), load, wanted)
    click.echo(json.dumps(as_json(made), indent=2) if as_data else render(made), nl=as_data)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _validate(folder: Path, subject: "Subject", given: "GivenSpeeds", device: str, clock: "ClockName") -> None:
    from quantpipe.errors import RecipeError

    if device != "cpu" or not folder.is_dir():
        raise RecipeError("--validate: takes a model folder and this machine's CPU; leave --gpu out")
    from quantpipe.plan.validate import render, validate

    click.echo(render(validate(subject, folder, VALIDATED_CONCURRENCIES, VALIDATED_CONTEXTS, given, clock)), nl=False)
