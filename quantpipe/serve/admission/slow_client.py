"""Clients that ask and do not read: what they asked for is given up, and their connection with it.

Three things bound what is kept for them. What the kernel holds for a connection is small, so that it is noticed early
that nobody reads. A send that waits for the client for too long ends the request in the engine (``watched_send``), as
does a backlog of outputs (``Submission``). And the kernel drops a connection whose other end takes nothing.
"""

import asyncio
import socket
import sys
from collections.abc import Callable

from starlette.types import Message, Send

SEND_BUFFER_BYTES = 128 * 1024
DROP_AFTER_S = 5.0  # after the request was given up: a client that reads again gets the reason


def limit_buffers(listener: socket.socket, slow_client_s: float) -> None:
    """Set on ``listener`` what its connections inherit. Dropping connections is Linux's; elsewhere they stay open."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if sys.platform == "linux":
        after_ms = int(1000 * (slow_client_s + DROP_AFTER_S))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, after_ms)


def watched_send(send: Send, limit_s: float, give_up: Callable[[], None]) -> Send:
    """A ``send`` that calls ``give_up`` once a message has waited for the client for ``limit_s`` seconds."""
    event_loop = asyncio.get_running_loop()

    async def send_watched(message: Message) -> None:
        timer = event_loop.call_later(limit_s, give_up)
        try:
            await send(message)
        finally:
            timer.cancel()

    return send_watched
