"""One safetensors file: what its header says, and the bytes of its tensors. Knows no torch and no schemes.

Bytes are read, not mapped: memory that was read into is given back with the tensor, while pages of a mapped file count
as the process's own for as long as anything of the file is in use.

Source: the safetensors format: the length of the header (8 bytes, little-endian), the header (JSON), then the tensors.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantpipe.errors import ArtifactError
from quantpipe.formats.dtypes import DTYPE_BYTES
from quantpipe.formats.scheme import TensorSpec

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it


@dataclass(frozen=True)
class FileStamp:
    """Tells whether a file is still the one whose header was read."""

    inode: int
    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, opened: int) -> "FileStamp":
        """Of a file descriptor."""
        status = os.fstat(opened)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class TensorPlace:
    """Where in a file the bytes of a tensor lie, in row-major order, and what they are."""

    file: Path
    stamp: FileStamp
    spec: TensorSpec
    offset: int
    num_bytes: int

    def read_into(self, buffer: memoryview) -> None:
        """Fill ``buffer``, of ``num_bytes``. OSError, or ArtifactError where the file has been changed since."""
        for _ in self._pieces(buffer, self.num_bytes):
            pass

    def chunks(self, buffer: memoryview) -> Iterator[memoryview]:
        """The bytes, in pieces that are each read into ``buffer``. Errors as above."""
        return self._pieces(buffer, len(buffer), is_reused=True)

    def _pieces(self, buffer: memoryview, most: int, is_reused: bool = False) -> Iterator[memoryview]:
        opened = os.open(self.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            if FileStamp.of(opened) != self.stamp:
                raise ArtifactError(f"{self.file}: was changed while it was being read; start again")
            done = 0
            while done < self.num_bytes:
                first = 0 if is_reused else done
                piece = buffer[first : first + min(most, self.num_bytes - done)]
                num_read = os.preadv(opened, [piece], self.offset + done)
                if num_read == 0:
                    raise ArtifactError(f"{self.file}: ends before its tensors do; fetch it again")
                yield piece[:num_read]
                done += num_read
        finally:
            os.close(opened)


def read_header(file: Path) -> dict[str, TensorPlace]:
    """The tensors of a file by name. ArtifactError where it is no safetensors file, or not whole."""
    try:
        with file.open("rb") as opened:
            stamp = FileStamp.of(opened.fileno())
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, stamp.num_bytes - _LENGTH_BYTES):
                raise ValueError(f"its header cannot be {length:,} bytes long")
            header = json.loads(opened.read(length))
        return _places(file, stamp, _LENGTH_BYTES + length, header)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{file}: not a readable safetensors file: {error}") from error


def _places(file: Path, stamp: FileStamp, first: int, header: dict[str, Any]) -> dict[str, TensorPlace]:
    """ValueError unless tensors follow each other without gaps to the end of the file."""
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        spec = TensorSpec(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
        begin, end = entry["data_offsets"]
        item_bytes = DTYPE_BYTES.get(spec.dtype)
        if item_bytes is not None and end - begin != item_bytes * math.prod(spec.shape):
            raise ValueError(f"{name} takes {end - begin:,} bytes, not what {spec.dtype} {list(spec.shape)} does")
        places[name] = TensorPlace(file, stamp, spec, first + begin, end - begin)
    end = first
    for name, place in sorted(places.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if place.offset != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end += place.num_bytes
    if end != stamp.num_bytes:
        raise ValueError(f"its tensors end at byte {end:,} of {stamp.num_bytes:,}")
    return places
