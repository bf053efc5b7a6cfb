"""The engine's side of the connection: one thread reads and answers whether it is there, the caller's computes."""

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator

from quantpipe.serve.engine_process.messages import Add, Failed, FromEngine, Opening, Ping, Pong, Ready, ToEngine
from quantpipe.serve.engine_process.wire import FrameBuffer, encode, to_engine_decoder
from quantpipe.serve.loop import EngineLoop, Inbox, SteppedEngine

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18


class FrontGoneError(Exception):
    """The front closed its end, or died."""


class EngineHost:
    """What joins an engine to its front. ``on_end`` is called, in the reading thread, once the front is gone."""

    def __init__(self, connection: socket.socket, on_end: Callable[[], None] | None = None) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._on_end = on_end
        self._inbox = Inbox()
        self._opening: queue.SimpleQueue[Opening] = queue.SimpleQueue()
        self._loop: EngineLoop | None = None
        self._sending = threading.Lock()

    def listen(self) -> None:
        """Start the reading thread. The end of the front is noticed from now on, whatever the caller's thread does."""
        threading.Thread(target=self._listen, name="front", daemon=True).start()

    def wait_for_opening(self) -> Opening:
        """What to open."""
        return self._opening.get()

    def send(self, *messages: FromEngine) -> None:
        """Tell the front. FrontGoneError where there is none."""
        framed = encode(*messages)
        try:
            with self._sending:
                self._connection.sendall(framed)
        except OSError as error:
            raise FrontGoneError from error

    def serve(self, engine: SteppedEngine) -> bool:
        """Say that the engine is ready and run it until the front is gone; False where the engine failed before."""
        loop = self._loop = EngineLoop(engine, self._inbox, self.send)
        try:
            self.send(Ready())
            loop.run()
        except FrontGoneError:
            return True
        except Exception as error:
            logger.exception("the engine failed")
            self.send(Failed(type(error).__name__))
            return False
        return True

    def _listen(self) -> None:
        try:
            for message in self._messages():
                match message:
                    case Ping():
                        self.send(Pong(None if self._loop is None else self._loop.round))
                    case Opening():
                        self._opening.put(message)
                    case Add() if self._loop is not None and (refusal := self._loop.refusal(message)) is not None:
                        self.send(refusal)
                    case _:
                        self._inbox.put(message)
        except (FrontGoneError, OSError):
            pass
        except Exception:
            logger.exception("the engine does not understand its front")
        self._inbox.close()
        if self._on_end is not None:
            self._on_end()

    def _messages(self) -> Iterator[ToEngine]:
        frames = FrameBuffer()
        while data := self._connection.recv(READ_BYTES):
            for payload in frames.feed(data):
                yield to_engine_decoder.decode(payload)
