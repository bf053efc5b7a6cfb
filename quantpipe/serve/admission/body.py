"""The body of a request, read whole before anything is done with it: bounded in size, time and number."""

import asyncio
from collections.abc import Iterable

from starlette.types import Message, Receive

from quantpipe.serve.admission.limits import Limits, RefusedError
from quantpipe.serve.submission import AbortedError, UnavailableError

NUM_WHOLE_BODIES = 64  # as many of the largest size may be on their way at a time


class BodyReader:
    """Reads bodies and knows how much of all of them it holds while they come."""

    def __init__(self, limits: Limits) -> None:
        self._max_bytes = limits.max_body_bytes
        self._limit_s = limits.slow_client_s
        self._num_held_bytes = 0

    async def read(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The body. RefusedError: 413 where it is too large, 408 where it comes too slowly. AbortedError where its
        client has gone."""
        self._check_size(_promised_bytes(headers))
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._read(receive)
        except TimeoutError:
            raise RefusedError(
                408, f"the body did not come within {self._limit_s:g} s; send it faster", "body_timeout"
            ) from None

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise AbortedError("the client closed the connection")
                part = message.get("body", b"")
                num_bytes += len(part)
                self._num_held_bytes += len(part)
                parts.append(part)
                self._check_size(num_bytes)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                if self._num_held_bytes > NUM_WHOLE_BODIES * self._max_bytes:
                    raise UnavailableError("too many large bodies come at once; try again later", "queue_full")
        finally:
            self._num_held_bytes -= num_bytes

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RefusedError(413, f"the body has more than {self._max_bytes:,} bytes; send less", "body_too_large")


def replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that begins with ``body`` once more, and goes on with what comes after it."""
    is_told = False

    async def replay() -> Message:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _promised_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """What Content-Length says; 0 where it says nothing that can be used: the body is counted anyway."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
