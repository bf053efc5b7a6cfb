"""What ``quantpipe serve`` takes for the server itself, and ``quantpipe serve-key``. Heavy imports inside."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from quantpipe.cli_arms import ARM_OPTIONS, take_arms
from quantpipe.cli_options import NumberRange

MOST_WAIT_S = 86_400.0  # a day

Command = TypeVar("Command", bound=Callable[..., Any])

LIMIT_OPTIONS = (
    click.option(
        "--max-open-prompts",
        default=256,
        show_default=True,
        type=click.IntRange(min=1),
        help="Most prompts that run or wait, each choice counted; more are refused (503).",
    ),
    click.option(
        "--max-open-tokens",
        type=click.IntRange(min=1),
        help="Most tokens of them, with what they may yet get. Default: no limit.",
    ),
    click.option(
        "--max-prompt-tokens", type=click.IntRange(min=1), help="Longest prompt. Default: what the model takes."
    ),
    click.option(
        "--max-body-bytes",
        default=4 * 1024 * 1024,
        show_default=True,
        type=click.IntRange(min=1),
        help="Largest request body.",
    ),
    click.option(
        "--slow-client-s",
        default=60.0,
        show_default=True,
        type=NumberRange(0, min_open=True, max=3600),
        help="Seconds without reading after which a client is given up.",
    ),
)
LIMIT_NAMES = ("max_open_prompts", "max_open_tokens", "max_prompt_tokens", "max_body_bytes", "slow_client_s")
WAIT_OPTIONS = (
    click.option(
        "--drain-s",
        default=30.0,
        show_default=True,
        type=NumberRange(0, MOST_WAIT_S),
        help="Seconds that open requests get to finish when the server is told to stop.",
    ),
    click.option(
        "--stalled-s",
        default=30.0,
        show_default=True,
        type=NumberRange(0, MOST_WAIT_S, min_open=True),
        help="Seconds without progress of the engine after which the server is not ready.",
    ),
    click.option(
        "--hung-s",
        default=120.0,
        show_default=True,
        type=NumberRange(0, MOST_WAIT_S, min_open=True),
        help="Seconds without progress after which the engine is killed and started again.",
    ),
    click.option(
        "--load-s",
        default=1800.0,
        show_default=True,
        type=NumberRange(0, MOST_WAIT_S, min_open=True),
        help="Seconds that an engine may take to be ready, from its start; one that takes longer is killed.",
    ),
)
FRONT_OPTIONS = (
    *ARM_OPTIONS,
    click.option(
        "--tool-parser",
        type=click.Choice(["hermes", "llama3"]),
        help="How the model writes calls of tools. Default: as its chat template shows.",
    ),
    *WAIT_OPTIONS,
    *LIMIT_OPTIONS,
    click.option(
        "--api-keys",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Who may use the server: lines made by `quantpipe serve-key`. Default: everybody who reaches it.",
    ),
    click.option("--open-metrics", is_flag=True, help="With keys: let /metrics be read without one."),
    click.option(
        "--log-format",
        default="text",
        show_default=True,
        type=click.Choice(["text", "json", "none"]),
        help="Lines on standard error, one for each request; never what was asked or answered.",
    ),
    click.option("--ssl-certfile", type=click.Path(path_type=Path), help="Certificate in PEM format: serve HTTPS."),
    click.option("--ssl-keyfile", type=click.Path(path_type=Path), help="Its key, if in a file of its own."),
)


def front_arguments(command: Command) -> Command:
    """Give a command that has ``artifacts`` the options of the server itself, as one argument ``front``, checked."""

    @functools.wraps(command)
    def with_front(**values: Any) -> Any:
        from quantpipe.serve.admission.limits import Limits
        from quantpipe.serve.engine_process.watch import WatchLimits
        from quantpipe.serve.front_options import FrontOptions
        from quantpipe.serve.keys import read_keys

        split, shadow = take_arms(values)
        limits = Limits(**{name: values.pop(name) for name in LIMIT_NAMES})
        keys_path, log_format = values.pop("api_keys"), values.pop("log_format")
        front = FrontOptions(
            limits=limits,
            drain_s=values.pop("drain_s"),
            watch=WatchLimits(values.pop("stalled_s"), values.pop("hung_s"), values.pop("load_s")),
            tool_parser=values.pop("tool_parser"),
            keys=None if keys_path is None else read_keys(keys_path),
            are_metrics_open=values.pop("open_metrics"),
            log_format=None if log_format == "none" else log_format,
            ssl_certfile=values.pop("ssl_certfile"),
            ssl_keyfile=values.pop("ssl_keyfile"),
            split=split,
            shadow=shadow,
        )
        front.check_ssl()
        return command(**values, front=front)

    for option in reversed(FRONT_OPTIONS):
        with_front = option(with_front)
    return with_front  # type: ignore[return-value]


@click.command("serve-key")
@click.argument("name")
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Add the key to this file. Default: print the line for it.",
)
def serve_key(name: str, api_keys: Path | None) -> None:
    """Make an API key for NAME and print its secret, once: only a digest of it is kept."""
    from quantpipe.serve.keys import add_key, check_name, key_line, new_secret

    if api_keys is not None:
        click.echo(add_key(api_keys, name))
        click.echo(f"{api_keys}: '{name}' was added; the line above is the secret, which is kept nowhere", err=True)
        return
    check_name(name, "serve-key")
    secret = new_secret()
    click.echo(secret)
    click.echo(key_line(name, secret), nl=False)
    click.echo("the first line is the secret, which is kept nowhere; the second is for the file", err=True)
