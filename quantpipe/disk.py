"""A disk that takes no more, whichever library finds out: one line that names the file. And folders that stay empty.

Knows no formats.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantpipe.errors import DataError, QuantpipeError

GO_ON = "run it again to go on from there"
_FULL = "no space left on the disk; free space"
_QUOTA = "the disk quota is used up; free space"
_LARGE = "the file may not grow larger here; raise the limit (ulimit -f) or take another disk"
_BY_NUMBER = {errno.ENOSPC: _FULL, errno.EDQUOT: _QUOTA, errno.EFBIG: _LARGE}
# What libraries leave of the system's error: Rust its number, pip and wheels its text, torch and numpy neither.
_RUST = re.compile(r"\(os error (\d+)\)")
_BY_TEXT = {"no space left": _FULL, "quota exceeded": _QUOTA, "file too large": _LARGE}
_CUT_SHORT = re.compile(r"PytorchStreamWriter failed writing|unexpected pos \d+ vs \d+|\d+ requested and \d+ written")


@contextmanager
def writing(path: Path, again: str = "run it again") -> Iterator[None]:
    """Within it, an error that says that the disk takes no more becomes a DataError that names ``path``.

    ``again``: what to do once there is space.
    """
    try:
        yield
    except QuantpipeError:
        raise
    except Exception as error:
        refusal = disk_refusal(error)
        if refusal is None:
            raise
        raise DataError(f"{path}: {refusal} and {again}") from error


@contextmanager
def removing_empty(folder: Path) -> Iterator[None]:
    """Within it ``folder`` and those above it may be made; what is new and still empty at the end is removed."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    finally:
        for each in new:
            with suppress(OSError):  # it holds something, or was never made
                each.rmdir()


def disk_refusal(error: BaseException | str) -> str | None:
    """Why the disk takes no more, and what helps, where ``error`` or what led to it says so; None where none does."""
    seen: list[BaseException] = []
    current: BaseException | str | None = error
    while current is not None and current not in seen:
        if isinstance(current, OSError) and current.errno in _BY_NUMBER:
            return _BY_NUMBER[current.errno]
        if (found := _in_text(str(current))) is not None:
            return found
        if isinstance(current, str):
            return None
        seen.append(current)
        current = current.__cause__ or current.__context__
    return None


def _in_text(text: str) -> str | None:
    number = _RUST.search(text)
    if number is not None:
        return _BY_NUMBER.get(int(number[1]))
    if _CUT_SHORT.search(text):
        return _FULL
    return next((refusal for sign, refusal in _BY_TEXT.items() if sign in text.lower()), None)
