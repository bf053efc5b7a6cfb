"""The metadata of a GGUF file, read without its tensors. Knows the container, not what any key means.

Source: the GGUF specification, versions 2 and 3 (little-endian).
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from quantpipe.errors import DataError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Value type number -> struct format of one value.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """A position in the mapped file that moves forward as values are read."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        end = self.offset + struct.calcsize(layout)
        values = struct.unpack(layout, self.data[self.offset : end])
        self.offset = end
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q", 1)
        if length > len(self.data):
            raise struct.error("a string is longer than the file")
        text = self.data[self.offset : self.offset + length].decode("utf-8", errors="replace")
        self.offset += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(_FORMATS[kind], 1)[0]
        item_kind, count = *self.numbers("I", 1), *self.numbers("Q", 1)
        if count > len(self.data):
            raise struct.error("an array is longer than the file")
        if item_kind in _FORMATS:
            return list(self.numbers(_FORMATS[item_kind], count))
        return [self.value(item_kind) for _ in range(count)]


def read_gguf_header(file: Path) -> dict[str, Any]:
    """Key -> value of everything before the tensors. Raises DataError where the file is not GGUF or is cut short."""
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise DataError(f"{file}: not a GGUF file (its first four bytes are not 'GGUF'); give another file")
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        cursor = _Cursor(data, len(MAGIC))
        try:
            (version,) = cursor.numbers("I", 1)
            if version not in VERSIONS:
                raise DataError(f"{file}: GGUF version {version}; allowed: 2 or 3, little-endian")
            _, num_keys = cursor.numbers("Q", 2)
            pairs = ((cursor.string(), cursor.value(*cursor.numbers("I", 1))) for _ in range(num_keys))
            return dict(pairs)
        except (struct.error, KeyError, OverflowError, MemoryError) as error:
            raise DataError(f"{file}: the GGUF header is cut short or damaged at byte {cursor.offset}") from error
