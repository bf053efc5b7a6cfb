"""Keeps an engine's process running: starts it, sees that it died or hangs, and starts another. Knows no requests."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from quantpipe.errors import QuantpipeError, RecipeError
from quantpipe.serve.engine_process.backoff import Backoff
from quantpipe.serve.engine_process.connection import EngineConnection, EngineEndedError
from quantpipe.serve.engine_process.launch import EngineProcess, Launch
from quantpipe.serve.engine_process.messages import EngineFacts, FromEngine, Opening, Ping, Pong, Stepped
from quantpipe.serve.engine_process.watch import EngineWatch, WatchLimits
from quantpipe.serve.engine_process.wire import encode

logger = logging.getLogger(__name__)

Stage = TypeVar("Stage")
EngineWord = Literal["starting", "ready", "stalled", "failed"]


@dataclass(frozen=True)
class EngineState:
    """How an engine fares: ``stalled`` without a sign of progress for ``still_s`` seconds, ``failed`` for a ``reason``.

    A process that is started in place of one that failed keeps the reason until it is ready, which should be in
    ``retry_after_s`` seconds.
    """

    word: EngineWord
    reason: str | None
    still_s: float
    num_restarts: int
    retry_after_s: int = 1


class EngineSupervisor:
    """Starts engines with ``launch`` and has each load ``opening``.

    ``on_message`` gets what an engine says that is ready; ``on_lost``, as soon as one is gone, the reason.
    Everything here runs in one event loop, but for ``launch`` and ``kill``, which need none.
    """

    def __init__(
        self,
        launch: Launch,
        opening: Opening,
        limits: WatchLimits,
        on_message: Callable[[FromEngine], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.facts: EngineFacts | None = None  # of the engine that was loaded last
        self.failure: str | None = None
        self.num_restarts = 0
        self._launch = launch
        self._folder = os.fsdecode(opening.folder)
        self._opening = _framed(opening)
        self._limits = limits
        self._on_message = on_message
        self._on_lost = on_lost
        self._watch = EngineWatch(limits.interval_s)
        self._launched: tuple[EngineProcess, socket.socket] | None = None
        self._process: EngineProcess | None = None  # of the engine that is there now
        self._connection: EngineConnection | None = None
        self._has_served = False
        self._is_stopping = False
        self._backoff = Backoff()
        self._launched_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def state(self) -> EngineState:
        """How the engine fares at this moment."""
        word: EngineWord
        connection = self._connection
        if connection is not None and connection.is_ready:
            still_s = self._watch.still_s
            word = "stalled" if still_s > self._limits.stalled_s else "ready"
            return EngineState(word, None, still_s, self.num_restarts)
        is_gone = self.failure is not None and (connection is None or connection.lost.is_set())
        word = "failed" if is_gone else "starting"
        return EngineState(word, self.failure, 0.0, self.num_restarts, self._backoff.retry_after_s)

    def launch(self) -> None:
        """Start a process, unless there is one, and tell it what to open. OSError where none can be had."""
        if self._launched is not None or self._connection is not None:
            return
        self._launched_s = time.monotonic()
        self._launched = self._process, connection = self._launch()
        with suppress(OSError):  # it has died already, which is noticed where somebody waits for it
            connection.sendall(self._opening)

    async def open(self) -> None:
        """Wait until the first engine has loaded its model. Raises what it cannot be loaded for."""
        if self.facts is not None:
            return
        if self._connection is None:
            await self._connect()
        connection = self._connection
        assert connection is not None, "just connected"
        try:
            self.facts = await self._in_time(connection, connection.opened)
        except EngineEndedError:
            raise await self._ended_early(connection) from None

    async def start(self) -> None:
        """Wait until the first engine is ready, and watch it from then on."""
        if self._tasks:
            return
        await self.open()
        connection = self._connection
        assert connection is not None, "just opened"
        try:
            await self._in_time(connection, connection.ready)
        except EngineEndedError:
            raise await self._ended_early(connection) from None
        self._backoff.start_s = time.monotonic() - self._launched_s
        self._tasks = [asyncio.create_task(self._keep_running()), asyncio.create_task(self._keep_watch())]

    def send(self, framed: bytes) -> None:
        """Tell the engine; nothing happens where there is none."""
        if self._connection is not None:
            self._connection.send(framed)

    async def stop(self) -> None:
        """End the process and start no other."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self._connection is not None:
            await self._connection.end()
        self.kill()

    def kill(self) -> None:
        """Leave no process behind, whatever happened before. Harmless where there is none."""
        self._is_stopping = True
        if self._launched is not None:
            self._launched[1].close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def _connect(self) -> None:
        self.launch()
        assert self._launched is not None, "just launched"
        process, ours = self._launched
        connection = EngineConnection(process, self._receive, self._lose)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        self._launched = None
        self._connection = connection
        self._watch = EngineWatch(self._limits.interval_s)
        self._has_served = False

    async def _in_time(self, connection: EngineConnection, stage: asyncio.Future[Stage]) -> Stage:
        """What a stage of a start ends with. A process that takes longer than it may is killed: QuantpipeError."""
        try:
            async with asyncio.timeout(self._launched_s + self._limits.load_s - time.monotonic()):
                return await asyncio.shield(stage)
        except TimeoutError:
            connection.process.kill()
            raise QuantpipeError(
                f"{self._folder}: the engine was not ready within {self._limits.load_s:g} s and was killed; raise "
                "--load-s, or see what its loading waits for"
            ) from None

    async def _ended_early(self, connection: EngineConnection) -> QuantpipeError:
        how = await connection.end()
        hint = "; memory may have run out, see the system's log" if "SIGKILL" in how else ""
        return QuantpipeError(f"{self._folder}: the engine's process {how} before it was ready{hint}")

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Pong):
            self._watch.answered(message.round)
            return
        if isinstance(message, Stepped):
            self._watch.moved()
            if any(output.finish_reason is not None for output in message.outputs):
                self._has_served = True
        self._on_message(message)

    def _lose(self, failure_kind: str | None) -> None:
        if self._is_stopping:
            return
        if failure_kind is not None:
            why = failure_kind
        elif self._is_hung:
            why = f"it did not move for {self._watch.still_s:.0f} s and was killed"
        else:
            why = "its process died"
        self.failure = f"the engine failed ({why}) and is started again; try again later"
        self._on_lost(self.failure)

    @property
    def _is_hung(self) -> bool:
        return self._watch.still_s > self._limits.hung_s

    async def _keep_running(self) -> None:
        """Wait for the end of each engine, and start the next: at first soon, then less and less often."""
        while True:
            assert self._connection is not None, "there is one, or the last has just been lost"
            await self._connection.lost.wait()
            how = await self._connection.end()
            if self._has_served:
                self._backoff.reset()
            self._connection, delay_s = None, self._backoff.next_delay_s()
            logger.error("engine: its process %s; another is started in %g s", how, delay_s)
            await asyncio.sleep(delay_s)
            while not await self._start_again():
                await asyncio.sleep(self._backoff.next_delay_s())

    async def _start_again(self) -> bool:
        """Whether a new engine became ready. Where it did not, it is gone, and the reason is the failure."""
        self.num_restarts += 1
        try:
            await self._connect()
            connection = self._connection
            assert connection is not None, "just connected"
            self.facts = await self._in_time(connection, connection.opened)
            await self._in_time(connection, connection.ready)
        except Exception as error:
            self.failure = f"the engine cannot be started again: {error}"
        else:
            self.failure = None
            self._backoff.start_s = time.monotonic() - self._launched_s
            return True
        if self._connection is not None:
            how, self._connection = await self._connection.end(), None
            logger.error("engine: its process %s: %s", how, self.failure)
        return False

    async def _keep_watch(self) -> None:
        """Ask the engine at intervals whether it moves; kill one that hangs."""
        asked_s = time.monotonic()
        while True:
            await asyncio.sleep(self._limits.interval_s)
            now_s = time.monotonic()
            elapsed_s, asked_s = now_s - asked_s, now_s
            connection = self._connection
            if connection is None or not connection.is_ready:
                continue
            self._watch.pass_time(elapsed_s)
            if self._watch.ask():
                connection.send(encode(Ping()))
            if self._is_hung:
                logger.error("engine: no sign of progress for %.0f s; its process is killed", self._watch.still_s)
                connection.process.kill()
                await connection.lost.wait()


def _framed(opening: Opening) -> bytes:
    try:
        return encode(opening)
    except (OverflowError, UnicodeEncodeError) as error:
        raise RecipeError(f"engine: a setting has a value that none can have ({error})") from None
