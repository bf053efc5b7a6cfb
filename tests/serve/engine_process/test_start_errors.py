"""What an engine's process fails with ends the front in the same words and with the same exit code."""

import errno

import pytest

from quantpipe import cli
from quantpipe.cli_traceback import traceback_text
from quantpipe.errors import ArtifactError, QuantpipeError, RecipeError, RequestError, UnservedError
from quantpipe.serve.engine_process.start_errors import error_of, failure_of


class StrangeError(Exception):
    """Takes no text, and is known in one process only."""

    def __init__(self) -> None:
        super().__init__("something strange")


class OwnError(QuantpipeError):
    """None of those that every process knows."""

    exit_code = 5


@pytest.mark.parametrize(
    "error",
    [
        ArtifactError("/a: damaged; make it again"),
        UnservedError("no such family"),
        RecipeError("engine.x: unknown setting"),
        RequestError("prompt: empty", "prompt"),
        OwnError("in one process"),
        PermissionError(errno.EACCES, "Permission denied", "/a/b"),
        OSError(errno.ENOSPC, "No space left on device", "/a/b"),
        OSError("of no number"),
        RuntimeError("what torch says"),
        MemoryError(),
        StrangeError(),
    ],
)
def test_front_says_what_the_engine_would_have_said(error: Exception) -> None:
    assert cli.failure(error_of(failure_of(error))) == cli.failure(error)
    assert cli.failure(error_of(failure_of(error)), is_debugging=True) == cli.failure(error, is_debugging=True)


def test_the_engines_traceback_is_shown_where_the_fronts_would_be() -> None:
    def fail() -> None:
        raise RuntimeError("deep down")

    with pytest.raises(RuntimeError) as caught:
        fail()
    shown = traceback_text(error_of(failure_of(caught.value)))
    assert "in the engine's process:" in shown and 'raise RuntimeError("deep down")' in shown


def test_kinds_that_are_known_here_stay_themselves() -> None:
    assert isinstance(error_of(failure_of(UnservedError("a"))), UnservedError)
    assert isinstance(error_of(failure_of(PermissionError(errno.EACCES, "a", "b"))), PermissionError)
