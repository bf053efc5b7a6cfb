"""The ``doctor`` command. Everything heavy is imported inside; nothing here needs more than the runtime's libraries."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantpipe.errors import EXIT_INTERNAL, EXIT_PASS, QuantpipeError, RecipeError

if TYPE_CHECKING:
    import torch


@click.command()
@click.option("--gpu-check", is_flag=True, help="Check and time every GPU kernel; takes up to 8 minutes.")
@click.option("--only", multiple=True, metavar="PART", help="Of the GPU check this part only. May be repeated.")
@click.option("--skip", multiple=True, metavar="PART", help="Of the GPU check not this part. May be repeated.")
@click.option(
    "--output",
    default=Path("gpu-check.json"),
    show_default=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where the GPU check writes what it finds, part by part; parts that passed are not run again.",
)
@click.option("--fresh", is_flag=True, help="Begin the GPU check anew.")
def doctor(gpu_check: bool, only: tuple[str, ...], skip: tuple[str, ...], output: Path, fresh: bool) -> int:
    """Say what this machine has and can run. Exit code 0: all right; 1: something is broken, or a check failed."""
    if not gpu_check:
        _refuse_options_of_the_check()
        return _tell_facts()
    return _check_gpu(only, skip, output, fresh)


def _refuse_options_of_the_check() -> None:
    """RecipeError where an option is given that has no meaning without ``--gpu-check``."""
    context = click.get_current_context()
    for name in ("only", "skip", "output", "fresh"):
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise RecipeError(f"doctor: --{name} belongs to the GPU check; add --gpu-check")


def _tell_facts() -> int:
    from quantpipe.doctor.facts import machine_facts
    from quantpipe.doctor.tables import fact_lines

    facts = machine_facts()
    for line in fact_lines(facts):
        click.echo(line)
    return EXIT_INTERNAL if any(fact.state == "fault" for fact in facts) else EXIT_PASS


def _check_gpu(only: tuple[str, ...], skip: tuple[str, ...], output: Path, fresh: bool) -> int:
    from importlib.util import find_spec

    if find_spec("triton") is None:
        raise QuantpipeError("doctor: a GPU check needs the package triton; run `pip install 'quantpipe[triton]'`")
    from rich.console import Console

    from quantpipe.backends.triton.requirements import usable_device
    from quantpipe.doctor.parts import Part, chosen, run_parts
    from quantpipe.doctor.record import PartResult, Record
    from quantpipe.doctor.tables import show_part

    parts, device, console = chosen(only, skip), usable_device(), Console()

    def tell(part: Part, result: PartResult) -> None:
        show_part(console, part.title, result)

    record = Record(output, _identity(device), fresh)
    is_right = run_parts(parts, device, record, tell)
    was_run = any(record.parts[part.name].state != "absent" for part in parts)
    verdict = "FAILED" if not is_right else "all right" if was_run else "nothing was checked"
    click.echo(f"{verdict}: written to {output}")
    return EXIT_PASS if is_right else EXIT_INTERNAL


def _identity(device: "torch.device") -> dict[str, str]:
    """What results hold for."""
    import torch
    import triton

    from quantpipe import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreted on the CPU"
    return {"device": name, "quantpipe": __version__, "torch": torch.__version__, "triton": triton.__version__}
