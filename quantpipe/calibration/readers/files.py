"""The files of a source: which they are, their bytes unpacked, and a digest of what is stored. Knows no formats."""

import glob
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.definition.sources import FileSource
from quantpipe.calibration.readers.gzip_bytes import GzipBytes
from quantpipe.calibration.rows import FileRead, SourceReading
from quantpipe.errors import DataError

CHUNK_BYTES = 1 << 20
# The longest row, or object of a JSON document: what is held in memory at once.
MAX_ROW_BYTES = 16 << 20
LONGEST = f"{MAX_ROW_BYTES >> 20} MiB"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def files_of(source: FileSource, folder: Path) -> list[Path]:
    """The files that a source's path names, in name order. Raises DataError where there is none."""
    named = folder / source.path
    if named.is_dir():
        raise DataError(f"{named}: is a folder; give a file, or a pattern such as {named.name}/*")
    if named.exists():
        if not named.is_file():
            raise DataError(f"{named}: is not a file; give a file")
        return [named]
    if not any(character in source.path for character in "*?["):
        raise DataError(f"{named}: no such file; correct the path of source {source.label!r}")
    matches = glob.glob(str(named), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    found = sorted(path for match in matches if (path := Path(match)).is_file())
    if not found:
        raise DataError(f"{named}: no file matches; correct the path of source {source.label!r}")
    return found


def require_files(definition: SetDefinition) -> None:
    """Raise DataError, one line each, for sources of a set whose files are not there."""
    problems = []
    for source, place in zip(definition.sources, definition.places, strict=True):
        try:
            if isinstance(source, FileSource):
                files_of(source, definition.folder)
        except DataError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise DataError("\n".join(problems))


class HashedFile(io.RawIOBase):
    """A file's stored bytes, hashed as they are read."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._stored = file.open("rb", buffering=0)
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_read = self._stored.readinto(buffer) or 0
        self._digest.update(memoryview(buffer)[:num_read])
        self._num_bytes += num_read
        return num_read

    def read_to_end(self) -> FileRead:
        """Read what is left, so that the digest is that of the whole file."""
        while self.read(CHUNK_BYTES):
            pass
        return FileRead(str(self._file), self._digest.hexdigest(), self._num_bytes)

    def close(self) -> None:
        self._stored.close()
        super().close()


@contextmanager
def open_hashed(file: Path, seen: SourceReading) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked where its name ends with ``.gz``; its digest is added to ``seen`` at the end.

    Raises DataError where it cannot be read, or its compressed data is damaged or cut short.
    """
    try:
        hashed = HashedFile(file)
    except OSError as error:
        raise DataError(f"{file}: {(error.strerror or str(error)).lower()}; make it readable") from error
    seen.last_row = 0
    with hashed:
        opened: IO[bytes] = io.BufferedReader(hashed, CHUNK_BYTES)
        if file.name.lower().endswith(".gz"):
            opened = io.BufferedReader(GzipBytes(opened), CHUNK_BYTES)
        with unpacking(file, seen):
            yield opened
            seen.files.append(hashed.read_to_end())


@contextmanager
def unpacking(file: Path, seen: SourceReading) -> Iterator[None]:
    """Turns failures of reading and decompressing into DataError, with the last row that was whole."""
    try:
        yield
    except EOFError:
        raise DataError(
            f"{file}: the compressed data ends early, {_after(seen)}; copy or download the file again"
        ) from None
    except gzip.BadGzipFile:
        raise DataError(f"{file}: is not gzip; correct its name") from None
    except zlib.error:
        raise DataError(
            f"{file}: the compressed data is damaged {_after(seen)}; copy or download the file again"
        ) from None
    except OSError as error:
        found = (error.strerror or "cannot be read").lower()
        raise DataError(f"{file}: {found} {_after(seen)}; make it readable") from error


def _after(seen: SourceReading) -> str:
    return f"after row {seen.last_row:,}" if seen.last_row else "before its first row ends"


def read_some(opened: IO[bytes], num_bytes: int) -> bytes:
    """Up to ``num_bytes``, fewer at the end of the file or before damage, which the next call then meets."""
    pieces: list[bytes] = []
    while num_bytes > 0:
        try:
            piece = opened.read1(num_bytes)  # type: ignore[attr-defined]  # every file here is a BufferedReader
        except (EOFError, OSError, zlib.error):
            if not pieces:
                raise
            break
        if not piece:
            break
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def skip_mark(opened: IO[bytes], file: Path) -> None:
    """Skip a UTF-8 byte order mark. Raises DataError for one of UTF-16, which is not read row by row."""
    start = opened.peek(4)[:4]  # type: ignore[attr-defined]  # every file here is a BufferedReader
    if start[:2] in _UTF16_MARKS or start[1:2] == b"\0":
        raise DataError(f"{file}: looks like UTF-16; convert it to UTF-8")
    if start.startswith(b"\xef\xbb\xbf"):
        opened.read(3)
