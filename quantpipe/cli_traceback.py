"""What is shown of an error that nobody foresaw. Its text may quote a customer's row if it went through calibration.

Such a text is withheld: what is left names the kind of error and the lines of code, which is what a report needs.
"""

import traceback
from collections.abc import Iterator
from pathlib import Path

from quantpipe.errors import QuantpipeError

READ_ROWS = tuple(str(Path(__file__).parent / package) for package in ("calibration", "calibrate"))


def one_line(error: BaseException) -> str:
    """The kind of an error and its text, or the place in the code instead of a text that may quote a row."""
    if not may_quote_rows(error):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} (its text is withheld: it may quote a row)"
    )


def traceback_text(error: BaseException) -> str:
    """The traceback with the errors that led to it, oldest first, without what the error itself says: that is printed.

    The last line is the kind of error.
    """
    if not any(may_quote_rows(each) for each in _chain(error)):
        shown = "".join(traceback.format_exception(error))
        return f"{shown.removesuffix(''.join(traceback.format_exception_only(error)))}{type(error).__name__}\n"
    parts = []
    for each in reversed(list(_chain(error))):
        text = f": {each}" if isinstance(each, QuantpipeError) else " (its text is withheld: it may quote a row)"
        parts += ["Traceback (most recent call last):\n", *traceback.format_tb(each.__traceback__)]
        parts.append(f"{type(each).__name__}{'' if each is error else text}\n\n")
    return "".join(parts).rstrip("\n") + "\n"


def may_quote_rows(error: BaseException) -> bool:
    """Whether an error that is none of ours went through the code that reads rows."""
    frames = traceback.extract_tb(error.__traceback__)
    return not isinstance(error, QuantpipeError) and any(frame.filename.startswith(READ_ROWS) for frame in frames)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on, as Python would show them."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        seen.append(current)
        yield current
        hidden = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or hidden
