"""The command line: parse, make one call, print. Everything heavy is imported inside the command that needs it.

A command returns its exit code (None is 0). Results go to standard output; progress and errors to standard error.
"""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from quantpipe import __version__
from quantpipe.errors import EXIT_DATA, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_PASS, EXIT_USAGE, QuantpipeError

EXIT_BROKEN_PIPE = 141  # as a shell reports a process that wrote to a closed pipe

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass
class Session:
    """What the options before the command ask for."""

    debug: bool = False


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="quantpipe")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_obj
def commands(session: Session, debug: bool) -> None:
    """From one recipe to a released, quantized, served language model, or a refusal with the reason."""
    session.debug = debug


def recipe_arguments(command: Command) -> Command:
    """Give a command its RECIPE argument and the ``--set`` option."""
    option = click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY.PATH=VALUE",
        help="Replace or add one value of the recipe; read as YAML, paths relative to the recipe. May be repeated.",
    )
    argument = click.argument("recipe", type=click.Path(path_type=Path))
    return argument(option(command))


@commands.command()
@recipe_arguments
def check(recipe: Path, overrides: Sequence[str]) -> None:
    """Check RECIPE: report every mistake at once, load nothing."""
    from quantpipe.recipe import load_recipe
    from quantpipe.recipe_reference import summary

    click.echo(summary(load_recipe(recipe, overrides)))


@commands.command()
@click.option("--markdown", is_flag=True, help="Print the key reference for people instead.")
def schema(markdown: bool) -> None:
    """Print the JSON schema of a recipe, for completion and checks in an editor."""
    import json

    from quantpipe.recipe_reference import key_reference, recipe_schema

    click.echo(key_reference() if markdown else json.dumps(recipe_schema(), indent=2), nl=not markdown)


def main() -> None:
    """Entry point of the ``quantpipe`` script: run the command line and end the process with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; every failure becomes one line on standard error."""
    session = Session()
    try:
        code = commands.main(list(arguments), prog_name="quantpipe", standalone_mode=False, obj=session)
        sys.stdout.flush()
        return code if isinstance(code, int) else EXIT_PASS
    except BrokenPipeError:
        # The reader is gone; keep the interpreter from failing on the same pipe when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except SystemExit:  # how click leaves when the pipe closes under a command's own output
        return EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        click.echo("quantpipe: interrupted; nothing half-written was kept", err=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if session.debug:
            traceback.print_exc()
        message, code = failure(error)
        click.echo(message, err=True)
        return code


def failure(error: Exception) -> tuple[str, int]:
    """What to print for an error, and the exit code."""
    if isinstance(error, QuantpipeError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        context = error.ctx if isinstance(error, click.UsageError) else None
        command = context.command_path if context is not None else "quantpipe"
        text = " ".join(error.format_message().split())
        return f"{command}: {text.removesuffix('.')}; see {command} --help", EXIT_USAGE
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'disk'}: no space left; free some and run the command again", EXIT_DATA
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.filename or 'file'}: may not be read or written; change its permissions", EXIT_DATA
    text = " ".join(str(error).split())
    hint = "run the command again as 'quantpipe --debug ...' for the traceback, and report it"
    return f"internal error: {type(error).__name__}: {text}; {hint}", EXIT_INTERNAL
