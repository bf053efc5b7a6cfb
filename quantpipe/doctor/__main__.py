"""``python -m quantpipe.doctor``: the command by itself, where only the runtime's libraries are installed."""

import sys

import click

from quantpipe.doctor.command import doctor
from quantpipe.errors import EXIT_USAGE, QuantpipeError


def main() -> int:
    """Run it and return the exit code; a refusal is one line."""
    try:
        code = doctor.main(sys.argv[1:], prog_name="quantpipe.doctor", standalone_mode=False)
    except QuantpipeError as error:
        click.echo(str(error), err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"quantpipe.doctor: {error.format_message()}", err=True)
        return EXIT_USAGE
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
