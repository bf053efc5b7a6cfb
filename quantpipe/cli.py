"""The command line: parse, make one call, print. Everything heavy is imported inside the command that needs it.

A command returns its exit code (None is 0). Results go to standard output; progress and errors to standard error.
"""

import errno
import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantpipe import __version__
from quantpipe.cache import cache_folder
from quantpipe.cli_bench import bench
from quantpipe.cli_calibrate import calibrate
from quantpipe.cli_front import front_arguments, serve_key
from quantpipe.cli_options import (
    open_reporter,
    optional_recipe_arguments,
    read_recipe,
    read_settings,
    recipe_arguments,
)
from quantpipe.cli_traceback import one_line, traceback_text
from quantpipe.disk import disk_refusal
from quantpipe.doctor.command import doctor
from quantpipe.errors import EXIT_DATA, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_PASS, EXIT_USAGE, QuantpipeError

if TYPE_CHECKING:
    from quantpipe.backends.protocol import Activations
    from quantpipe.gate.judge import GateResult
    from quantpipe.serve.front_options import FrontOptions

EXIT_BROKEN_PIPE = 141  # as a shell reports a process that wrote to a closed pipe
EXIT_TERMINATED = 143  # and one that was sent SIGTERM


class _TerminatedError(BaseException):
    """SIGTERM came. No Exception: nothing that goes on after failures may swallow it."""


class StopSignals:
    """The signals that told the process to end. A library may turn what a handler raises into an error of its own."""

    def __init__(self) -> None:
        self.arrived: list[int] = []

    def listen(self) -> None:
        """Raise where a signal arrives, and note it. A SIGINT that the shell made the process ignore stays ignored."""
        signal.signal(signal.SIGTERM, self._stop)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._stop)

    def _stop(self, number: int, _frame: object) -> None:
        self.arrived.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else _TerminatedError


@dataclass
class Session:
    """What the options before the command ask for."""

    debug: bool = False
    command: str | None = None


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="quantpipe")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def commands(context: click.Context, debug: bool) -> None:
    """From one recipe to a released, quantized, served language model, or a refusal with the reason."""
    session: Session = context.obj
    session.debug, session.command = debug, context.invoked_subcommand


commands.add_command(calibrate)
commands.add_command(bench)
commands.add_command(doctor)
commands.add_command(serve_key)


@commands.command()
@recipe_arguments
def check(recipe: Path, overrides: Sequence[str]) -> None:
    """Check RECIPE: report every mistake at once, load nothing."""
    from quantpipe.recipe.reference import summary

    click.echo(summary(read_recipe(recipe, overrides)))


@commands.command()
@click.option("--markdown", is_flag=True, help="Print the key reference for people instead.")
@click.option("--calibration-set", is_flag=True, help="Of a calibration set's set.yaml, not of a recipe.")
def schema(markdown: bool, calibration_set: bool) -> None:
    """Print the JSON schema of a recipe, for completion and checks in an editor."""
    import json

    if calibration_set:
        from quantpipe.calibration.definition.reference import set_reference as reference
        from quantpipe.calibration.definition.reference import set_schema as schema_of
    else:
        from quantpipe.recipe.reference import key_reference as reference
        from quantpipe.recipe.reference import recipe_schema as schema_of
    click.echo(reference() if markdown else json.dumps(schema_of(), indent=2), nl=not markdown)


@commands.command("run")
@recipe_arguments
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def run_command(recipe: Path, overrides: Sequence[str], quiet: bool) -> int:
    """Make what RECIPE describes and judge it. Exit code 0: released; 4: refused; 5: not enough data to tell."""
    loaded = read_recipe(recipe, overrides, needs_gate=True)
    reporter = open_reporter(quiet)
    from quantpipe.pipeline import run_recipe

    return _show_verdict(run_recipe(loaded, recipe, cache_folder(), reporter), loaded.output)


@commands.command("quantize")
@recipe_arguments
@click.option("--quiet", is_flag=True, help="Print the artifact's folder only.")
def quantize_command(recipe: Path, overrides: Sequence[str], quiet: bool) -> None:
    """Make the artifact that RECIPE describes and judge nothing. Works on models that the runtime does not serve."""
    loaded = read_recipe(recipe, overrides)
    reporter = open_reporter(quiet)
    from quantpipe.pipeline import quantize_recipe

    click.echo(quantize_recipe(loaded, cache_folder(), reporter).artifact.folder)


@commands.command()
@optional_recipe_arguments
@click.option("--artifact", type=click.Path(path_type=Path), help="Model folder to judge, quantized or ordinary.")
@click.option(
    "--self-test",
    "is_self_test",
    is_flag=True,
    help="Judge damaged copies, which must fail: of RECIPE's artifact, or of small ones made on the spot.",
)
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def gate(recipe: Path | None, overrides: Sequence[str], artifact: Path | None, is_self_test: bool, quiet: bool) -> int:
    """Judge a model folder that exists already by RECIPE; write the verdict to gate-<folder> under its output."""
    if recipe is None and not (is_self_test and artifact is None and not overrides):
        raise click.UsageError("Missing argument 'RECIPE'")
    loaded = None if recipe is None else read_recipe(recipe, overrides)
    reporter = open_reporter(quiet)
    if is_self_test:
        from quantpipe.controls.command import self_test

        return self_test(loaded, artifact, cache_folder(), reporter)
    if loaded is None or recipe is None or artifact is None:
        raise click.UsageError("Missing option '--artifact'")
    from quantpipe.pipeline import gate_artifact, gate_folder

    result = gate_artifact(loaded, recipe, artifact, cache_folder(), reporter)
    return _show_verdict(result, gate_folder(loaded, artifact))


@commands.command()
@click.argument("artifact", type=click.Path(path_type=Path))
def verify(artifact: Path) -> int:
    """Check every tensor and file of ARTIFACT against the digests in its manifest."""
    from quantpipe.formats.artifact import verify as find_faults

    problems = find_faults(artifact)
    for problem in problems:
        click.echo(f"{artifact}: {problem}", err=True)
    if not problems:
        click.echo(f"{artifact}: every tensor and file is as it was written")
    return EXIT_DATA if problems else EXIT_PASS


@commands.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--model-name", help="Name clients ask for. Default: the folder's name.")
@click.option("--backend", default="cpu", show_default=True, type=click.Choice(["cpu", "torch", "triton", "reference"]))
@click.option("--kv-dtype", metavar="MODE", help="A `kv_cache` of recipes. Default: as the gate judged.")
@click.option("--max-model-len", type=click.IntRange(min=2), help="Most tokens of one sequence.")
@click.option("--max-num-seqs", default=16, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--policy",
    default="fcfs",
    show_default=True,
    type=click.Choice(["fcfs", "priority", "shortest", "deadline"]),
    help="Who goes first.",
)
@click.option("--kv-cache-memory", type=click.IntRange(min=1), metavar="BYTES", help="Memory for keys and values.")
@click.option(
    "--memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Instead: the share of all memory that weights, steps, keys and values take together.",
)
@click.option(
    "--prefix-cache/--no-prefix-cache", default=True, help="Compute common beginnings of prompts once, or not."
)
@click.option(
    "--speculative",
    default="none",
    show_default=True,
    type=click.Choice(["none", "ngram"]),
    help="Guess tokens ahead: what followed the same words before.",
)
@click.option(
    "--num-draft-tokens", default=4, show_default=True, type=click.IntRange(min=1), help="Most guesses in a step."
)
@click.option(
    "--window-tokens", type=click.IntRange(min=16), help="Tokens that each layer looks back on: text without end."
)
@click.option(
    "--sink-tokens",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="First tokens that stay in sight of such a window, such as 4.",
)
@click.option("--num-threads", type=click.IntRange(min=1), help="CPU threads. Default: all cores.")
@click.option(
    "--activations",
    default="int16",
    show_default=True,
    type=click.Choice(["int8", "int16", "float32"]),
    help="What they are rounded to under weight-only schemes.",
)
@click.option(
    "--engine",
    "engine_settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any other setting of the engine, such as max_prefill_chunk=128 (docs/serving.md). May be repeated.",
)
@click.option("--skip-verify", is_flag=True, help="Start without checking digests: faster for large models.")
@front_arguments
def serve(
    artifact: Path,
    host: str,
    port: int,
    model_name: str | None,
    backend: str,
    kv_dtype: str | None,
    max_model_len: int | None,
    max_num_seqs: int,
    policy: str,
    kv_cache_memory: int | None,
    memory_utilization: float | None,
    prefix_cache: bool,
    speculative: str,
    num_draft_tokens: int,
    window_tokens: int | None,
    sink_tokens: int,
    num_threads: int | None,
    activations: "Activations",
    engine_settings: tuple[str, ...],
    skip_verify: bool,
    front: "FrontOptions",
) -> None:
    """Serve ARTIFACT over the OpenAI API until interrupted."""
    flags: dict[str, Any] = {
        "backend": backend,
        "kv_dtype": kv_dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "policy": policy,
        "kv_cache_memory": kv_cache_memory,
        "memory_utilization": memory_utilization,
        "prefix_cache": prefix_cache,
        "speculative": speculative,
        "num_draft_tokens": num_draft_tokens,
        "window_tokens": window_tokens,
        "sink_tokens": sink_tokens,
        "num_threads": num_threads,
        "activations": activations,
    }
    settings = flags | read_settings(engine_settings, flags)
    with _garbage_kept():
        from quantpipe.serve.server import run_server

        run_server(artifact, settings, host, port, model_name, not skip_verify, front)


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """No garbage collection: nearly all that a start makes stays, and searching it takes half a second.

    A server turns it on again itself, once it takes requests.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _show_verdict(result: "GateResult", output: Path) -> int:
    from rich.console import Console

    from quantpipe.gate.report import render_table

    console = Console()
    console.print(render_table(result))
    console.print(f"{result.verdict}: report in {output / 'report.md'}", highlight=False, soft_wrap=True)
    return result.verdict.exit_code


def main() -> None:
    """Entry point of the ``quantpipe`` script: run the command line and end the process with its exit code."""
    # Read by the libraries when they are imported. Spinning threads cost more than they save when a client,
    # or another process, shares the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of libraries; ours say the same
    signals = StopSignals()
    signals.listen()
    sys.exit(run(sys.argv[1:], signals.arrived))


def _left_behind(command: str | None) -> str:
    """What a command that was stopped leaves, for its last line."""
    match command:
        case "run":
            return "no verdict was written; run it again to go on from there"
        case "quantize":
            return "no artifact was written; run it again to go on from there"
        case "serve":
            return "nothing is served any more"
        case _:
            return "no file is half-written"


def run(arguments: Sequence[str], arrived: Sequence[int] = ()) -> int:
    """Run one command line and return its exit code; every failure becomes one line on standard error.

    ``arrived``: the signals to end that have come, as they come. After one, whatever is raised is its outcome.
    """
    session = Session()
    try:
        code = commands.main(list(arguments), prog_name="quantpipe", standalone_mode=False, obj=session)
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_PASS
    except BaseException as error:
        if isinstance(error, BrokenPipeError):
            # The reader is gone; keep the interpreter from failing on the same pipe when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if (stop := _stop_of(error, arrived)) is not None:
            word, code = stop
            click.echo(f"quantpipe: {word}; {_left_behind(session.command)}", err=True)
            return code
        # SystemExit is how click leaves when the pipe closes under a command's own output.
        if isinstance(error, BrokenPipeError | SystemExit):
            return EXIT_BROKEN_PIPE
        if not isinstance(error, Exception):
            raise
        if session.debug:
            click.echo(traceback_text(error), err=True, nl=False)
        message, code = failure(error, session.debug)
        click.echo(message, err=True)
        return code


def _stop_of(error: BaseException, arrived: Sequence[int]) -> tuple[str, int] | None:
    """How a command ended that was told to end, and its exit code; None where ``error`` is a failure of its own."""
    if isinstance(error, _TerminatedError) or (arrived and arrived[-1] == signal.SIGTERM):
        return "terminated", EXIT_TERMINATED
    return ("interrupted", EXIT_INTERRUPTED) if arrived or isinstance(error, KeyboardInterrupt | click.Abort) else None


def failure(error: Exception, is_debugging: bool = False) -> tuple[str, int]:
    """What to print for an error, below its traceback where ``is_debugging``, and the exit code."""
    if isinstance(error, QuantpipeError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        command = context.command_path if context is not None else "quantpipe"
        text = " ".join(error.format_message().split())
        return f"{command}: {text.removesuffix('.')}; see {command} --help", EXIT_USAGE
    if (refusal := disk_refusal(error)) is not None:
        return f"{getattr(error, 'filename', None) or 'disk'}: {refusal} and run the command again", EXIT_DATA
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or 'file'}: may not be read or written; change its permissions", EXIT_DATA
    again = "" if is_debugging else "run the command again as 'quantpipe --debug ...' for the traceback, and "
    hint = f"{again}report it"
    return f"internal error: {one_line(error)}; {hint}", EXIT_INTERNAL
