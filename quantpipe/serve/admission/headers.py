"""Requests whose headers do not come: a connection may be idle between requests, not stuck in the middle of one.

uvicorn closes idle connections, but waits for the rest of a request line and headers without end: a client that sends
a byte now and then would keep its connection for ever.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quantpipe.serve.admission.limits import RefusedError
from quantpipe.serve.api_errors import problem_of


class HeaderTimedProtocol(H11Protocol):
    """uvicorn's protocol of a connection, closed where a request's headers are not there ``limit_s`` seconds after its
    first byte, or nothing at all that long after the connection was made. uvicorn gives the rest by name.
    """

    def __init__(self, limit_s: float, **uvicorn_s: Any) -> None:
        super().__init__(**uvicorn_s)
        self._limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel()
        elif self._timer is None:
            self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _start(self) -> None:
        self._timer = self.loop.call_later(self._limit_s, self._give_up)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            self._refuse()
        self.transport.close()

    def _refuse(self) -> None:
        text = f"the headers did not come within {self._limit_s:g} s; send them faster"
        response = problem_of(RefusedError(408, text, "headers_timeout")).response()
        event = h11.Response(status_code=response.status_code, headers=response.raw_headers, reason=b"Request Timeout")
        for part in (event, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
