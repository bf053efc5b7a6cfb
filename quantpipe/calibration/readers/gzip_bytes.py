"""The bytes of a gzip file, to the last one before damage. Knows no rows.

The standard library's reader gives up a whole buffer of good bytes where it meets a bad one; here they come first.
"""

import gzip
import io
import zlib
from typing import IO, Any

MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20  # most bytes that one step unpacks: a small file may hold very many
_GZIP_BITS = 31  # header and check sums included


class GzipBytes(io.RawIOBase):
    """What a gzip file unpacks to, all members of it.

    Where it is damaged or ends early, reads give every byte that can be unpacked, and then, again and again, raise
    zlib.error, EOFError, BadGzipFile (no gzip at all), or the OSError of the file.
    """

    def __init__(self, stored: IO[bytes]) -> None:
        super().__init__()
        self._stored = stored
        self._unpack = zlib.decompressobj(_GZIP_BITS)
        self._packed, self._ready = b"", memoryview(b"")
        self._is_inside, self._has_begun = False, False  # a member; the first one
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._error is None:
            try:
                if not self._step():
                    return 0
            except (EOFError, OSError, zlib.error) as error:
                self._error = error
        if not self._ready and self._error is not None:
            raise self._error
        num_bytes = min(len(buffer), len(self._ready))
        memoryview(buffer)[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def _step(self) -> bool:
        """Unpack some more; False at the end of the file."""
        if self._unpack.eof:
            self._packed, self._is_inside = self._unpack.unused_data, False
            self._unpack = zlib.decompressobj(_GZIP_BITS)
        if len(self._packed) < len(MAGIC):
            chunk = self._stored.read(_CHUNK_BYTES)
            if not chunk:
                return self._end()
            self._packed += chunk
        if not self._is_inside:
            self._begin()
        if self._is_inside:
            self._unpack_some()
        return True

    def _end(self) -> bool:
        if self._is_inside:
            self._ready = memoryview(self._unpack.flush())
        if self._is_inside or self._packed.strip(b"\0"):
            raise EOFError
        return False

    def _begin(self) -> None:
        """Note that a member begins, once there are bytes enough to tell."""
        if self._has_begun:
            self._packed = self._packed.lstrip(b"\0")  # padding between members
        if len(self._packed) < len(MAGIC):
            return
        if not self._packed.startswith(MAGIC):
            raise zlib.error("data between members") if self._has_begun else gzip.BadGzipFile
        self._is_inside = self._has_begun = True

    def _unpack_some(self) -> None:
        before, packed = self._unpack.copy(), self._packed
        try:
            self._ready = memoryview(self._unpack.decompress(packed, _PIECE_BYTES))
        except zlib.error:
            self._ready = memoryview(_up_to_damage(before, packed))
            raise
        self._packed = self._unpack.unconsumed_tail


def _up_to_damage(unpack: Any, packed: bytes) -> bytes:
    """What can be unpacked before the damage that is known to be in ``packed``, a byte at a time."""
    pieces = []
    for place in range(len(packed)):
        try:
            pieces.append(unpack.decompress(packed[place : place + 1]))
        except zlib.error:
            break
    return b"".join(pieces)
