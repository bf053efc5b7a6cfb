"""An error that an engine's process could not start for, told so that the front fails in the same words and exit code.

Of an error that is none of ours the kind, the text and the traceback arrive, as the cause of a namesake.
"""

import traceback

from quantpipe import errors
from quantpipe.errors import QuantpipeError
from quantpipe.serve.engine_process.messages import StartFailure


class EngineTraceback(Exception):  # noqa: N818 - it is no error of its own
    """The traceback of an error in the engine's process."""

    def __str__(self) -> str:
        return f"in the engine's process:\n{self.args[0]}"


def failure_of(error: Exception) -> StartFailure:
    """What the front is told."""
    is_system = isinstance(error, OSError) and error.errno is not None
    return StartFailure(
        kind=type(error).__name__,
        message=str(error.strerror if isinstance(error, OSError) and is_system else error),
        exit_code=error.exit_code if isinstance(error, QuantpipeError) else None,
        traceback="".join(traceback.format_exception(error)),
        errno=error.errno if isinstance(error, OSError) else None,
        filename=str(error.filename) if isinstance(error, OSError) and error.filename is not None else None,
    )


def error_of(failure: StartFailure) -> Exception:
    """The error to raise in the front."""
    error: Exception
    if failure.exit_code is not None:
        error = getattr(errors, failure.kind, QuantpipeError)(failure.message)
        assert isinstance(error, QuantpipeError), "failure.kind is the name of a class of ours"
        error.exit_code = failure.exit_code
    elif failure.errno is not None:
        error = OSError(failure.errno, failure.message, failure.filename)
    else:
        error = type(failure.kind, (Exception,), {})(failure.message)
    error.__cause__ = EngineTraceback(failure.traceback)
    return error
