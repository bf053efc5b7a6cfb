"""Every failure a user can cause or meet, and the exit code each one ends the process with.

A message is one line: where, what was found, what to do. The CLI prints it without a traceback.
"""

import difflib
from collections.abc import Iterable

EXIT_PASS = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_DATA = 3
EXIT_GATE_FAILED = 4
EXIT_UNSURE = 5
EXIT_CONTROLS = 6
EXIT_INTERRUPTED = 130


class QuantpipeError(Exception):
    """A failure that is explained in one line; ``exit_code`` is what the process ends with."""

    exit_code = EXIT_INTERNAL


class RecipeError(QuantpipeError):
    """The recipe or the command line asks for something that is not legal."""

    exit_code = EXIT_USAGE


class DataError(QuantpipeError):
    """What the run reads or writes is missing, damaged, too small or out of reach (models, sets, disk, network)."""

    exit_code = EXIT_DATA


class ArtifactError(DataError):
    """A model folder does not hold what its configuration promises."""


class UnservedError(ArtifactError):
    """A model folder is sound, and of a kind that the bundled runtime does not serve."""


class UngatedError(QuantpipeError):
    """An artifact may not be served: no verdict, or none that passed, is about its files."""

    exit_code = EXIT_GATE_FAILED


class RequestError(QuantpipeError):
    """One request to the engine is malformed or can never be served; other requests are unharmed.

    ``param`` names the offending request parameter, as the HTTP API reports it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def nearest(found: str, known: Iterable[str]) -> str | None:
    """The name that ``found`` may be a misspelling of; None where none is near."""
    return next(iter(difflib.get_close_matches(found, sorted(known), n=1, cutoff=0.6)), None)


def suggest(found: str, known: Iterable[str], meant: str | None = None) -> str:
    """The tail of an error about an unknown name: ``; did you mean 'gptq'? (known: gptq, rtn)``.

    ``meant``: what it surely stands for; None: the name that is spelt most like it.
    """
    names = sorted(known)
    meant = nearest(found, names) if meant is None else meant
    hint = f"; did you mean '{meant}'?" if meant is not None else ""
    return f"{hint} (known: {', '.join(names) or 'none'})"
