"""The ``doctor`` command. Everything heavy is imported inside; nothing here needs more than the runtime's libraries."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantpipe.errors import EXIT_INTERNAL, EXIT_PASS, DataError, RecipeError

if TYPE_CHECKING:
    import torch

    from quantpipe.doctor.parts import Part

FACTS = "facts"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
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
        _refuse_options_of_the_check(only)
        return _tell_facts()
    return _check_gpu(only, skip, output, fresh)


def _refuse_options_of_the_check(only: Sequence[str]) -> None:
    """RecipeError where an option has no meaning without ``--gpu-check``; ``--only facts`` is what is done anyway."""
    context = click.get_current_context()
    for name in ("only", "skip", "output", "fresh"):
        if name == "only" and set(only) <= {FACTS}:
            continue
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
    from rich.console import Console

    from quantpipe.doctor.parts import Part, chosen, run_parts
    from quantpipe.doctor.record import PartResult, Record
    from quantpipe.doctor.tables import show_part

    parts = chosen(only, skip)
    _check_output(output)
    device, console = _device_for(parts), Console()

    def tell(part: Part, result: PartResult) -> None:
        show_part(console, part.title, result)

    record = Record(output, _identity(device), fresh)
    for note in record.notes:
        click.echo(note, err=True)
    is_right = run_parts(parts, device, record, tell)
    was_run = any(record.parts[part.name].state != "absent" for part in parts)
    verdict = "FAILED" if not is_right else "all right" if was_run else "nothing was checked"
    click.echo(f"{verdict}: written to {output}")
    return EXIT_PASS if is_right else EXIT_INTERNAL


def _check_output(output: Path) -> None:
    """DataError where a file cannot lie there: minutes of work would end without a record."""
    if not output.parent.is_dir():
        found = "is not a folder" if output.parent.exists() else "there is no such folder"
        raise DataError(f"--output: {output.parent}: {found}; make it, or give another --output")


def _device_for(parts: "Sequence[Part]") -> "torch.device":
    """What the parts run on; the CPU where none of them runs a kernel. RecipeError where kernels cannot run."""
    from importlib.util import find_spec

    import torch

    run_kernels = any(part.needs != "nothing" for part in parts)
    if find_spec("triton") is None:
        if run_kernels:
            raise RecipeError("doctor: --gpu-check needs the package triton; run `pip install 'quantpipe[triton]'`")
        return torch.device("cpu")
    from quantpipe.backends.triton.requirements import machine_fault, usable_device

    fault = machine_fault()
    if fault is None:
        return usable_device()
    if run_kernels:
        raise RecipeError(
            f"doctor: --gpu-check {fault}; without it `--only facts` tells what the machine has, and "
            "TRITON_INTERPRET=1 in the environment checks kernels in Triton's interpreter"
        )
    return torch.device("cpu")


def _identity(device: "torch.device") -> dict[str, str]:
    """What results hold for."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from quantpipe import __version__
    from quantpipe.doctor.facts import is_interpreted

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    on_cpu = "interpreted on the CPU" if is_interpreted() else "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    return {"device": name, "quantpipe": __version__, "torch": torch.__version__, "triton": triton}
