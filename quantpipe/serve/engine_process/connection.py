"""One life of an engine's process as its front sees it: loading, ready, gone. Knows asyncio; restarts nothing."""

import asyncio
import subprocess
from collections.abc import Callable

from quantpipe.errors import QuantpipeError
from quantpipe.serve.engine_process.launch import EngineProcess, how_it_ended
from quantpipe.serve.engine_process.messages import EngineFacts, Failed, FromEngine, Opened, Ready, StartFailure
from quantpipe.serve.engine_process.start_errors import error_of
from quantpipe.serve.engine_process.wire import FrameBuffer, from_engine_decoder

END_S = 5.0  # a process that was told to end needs a moment to give its memory back


class EngineEndedError(QuantpipeError):
    """The engine's process was gone before it was ready."""


class EngineConnection(asyncio.Protocol):
    """The front's end.

    ``opened``, then ``ready`` are done as the engine says so, or fail with why it cannot start. To be awaited shielded:
    who is cancelled while waiting would cancel them.

    ``on_message`` gets what else comes. Once an engine that was ready is gone, ``on_lost`` is called with the kind of
    error that it said it failed with, if it did.
    """

    def __init__(
        self,
        process: EngineProcess,
        on_message: Callable[[FromEngine], None],
        on_lost: Callable[[str | None], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.process = process
        self.opened: asyncio.Future[EngineFacts] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost = asyncio.Event()
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = FrameBuffer()
        self._failure_kind: str | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests."""
        return self.ready.done() and self.ready.exception() is None and not self.lost.is_set()

    def send(self, framed: bytes) -> None:
        """Tell the engine; nothing happens where it is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed)

    async def end(self) -> str:
        """Close this end, which ends the process, and say how it ended. One that does not end in time is killed."""
        if self._transport is not None:
            self._transport.abort()
        try:
            status = await asyncio.to_thread(self.process.wait, END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = await asyncio.to_thread(self.process.wait)
        return how_it_ended(status)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream socket has one"
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._receive(from_engine_decoder.decode(payload))

    def connection_lost(self, error: Exception | None) -> None:
        was_ready = self.is_ready
        self.lost.set()
        self._fail_start(EngineEndedError("its process ended before it was ready"))
        if was_ready:
            self._on_lost(self._failure_kind)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Opened(facts=facts):
                self.opened.set_result(facts)
            case Ready():
                self.ready.set_result(None)
            case StartFailure():
                self._fail_start(error_of(message))
            case Failed(kind=kind):
                self._failure_kind = kind
            case _:
                self._on_message(message)

    def _fail_start(self, error: Exception) -> None:
        for stage in (self.opened, self.ready):
            if not stage.done():
                stage.set_exception(error)
                stage.exception()  # seen: nobody needs to wait for it
