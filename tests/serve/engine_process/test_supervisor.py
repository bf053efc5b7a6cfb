"""Restarts: how soon, how often, and with what in between. The engines are scripts that answer as they are told."""

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from quantpipe.errors import ArtifactError, QuantpipeError
from quantpipe.serve.engine_process.backoff import FIRST_RESTART_S
from quantpipe.serve.engine_process.client import NO_STATS
from quantpipe.serve.engine_process.launch import EngineProcess
from quantpipe.serve.engine_process.messages import EngineFacts, FromEngine, Opened, Opening, Pong, Ready, Stepped
from quantpipe.serve.engine_process.start_errors import failure_of
from quantpipe.serve.engine_process.supervisor import EngineSupervisor
from quantpipe.serve.engine_process.watch import WatchLimits
from quantpipe.serve.engine_process.wire import encode

OPENED = Opened(EngineFacts(128))
FAST = WatchLimits(0.2, 0.5)


class Scripted:
    """An engine's process that says ``messages`` and, unless it ``stays``, ends."""

    pid = -1

    def __init__(self, messages: Sequence[FromEngine], stays: bool) -> None:
        ours, self._theirs = socket.socketpair()
        self.connection = ours
        self.was_killed = False
        self._theirs.sendall(encode(*messages))
        self._stays = stays
        threading.Thread(target=self._read, daemon=True).start()

    def answer(self, *messages: FromEngine) -> None:
        self._theirs.sendall(encode(*messages))

    def die(self) -> None:
        with suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        self.was_killed = True
        self.die()

    def wait(self, timeout: float | None = None) -> int:
        return -9 if self.was_killed else 1

    def _read(self) -> None:
        with self._theirs, suppress(OSError):
            while self._theirs.recv(4096) and self._stays:
                pass


class Launcher:
    """Starts one script after the other; the last one again and again."""

    def __init__(self, *scripts: tuple[Sequence[FromEngine], bool]) -> None:
        self.started: list[Scripted] = []
        self._scripts: Iterator[tuple[Sequence[FromEngine], bool]] = itertools.chain(
            scripts, itertools.repeat(scripts[-1])
        )

    def __call__(self) -> tuple[EngineProcess, socket.socket]:
        self.started.append(Scripted(*next(self._scripts)))
        return self.started[-1], self.started[-1].connection


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before restarts, which take no time here."""
    seen: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        if seconds >= FIRST_RESTART_S:
            seen.append(seconds)
            seconds = 0.001
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    return seen


def supervised(
    launcher: Launcher,
    use: Callable[[EngineSupervisor], Any],
    lost: list[tuple[str, str]] | None = None,
    limits: WatchLimits = FAST,
) -> None:
    """Run ``use`` with a started supervisor, and stop that whatever happens.

    ``lost`` gets the reason of each loss, and the state at that moment.
    """

    async def main() -> None:
        def on_lost(reason: str) -> None:
            if lost is not None:
                lost.append((reason, supervisor.state.word))

        supervisor = EngineSupervisor(launcher, Opening(b"folder"), limits, lambda message: None, on_lost)
        try:
            await supervisor.start()
            await asyncio.wait_for(use(supervisor), 10)
        finally:
            await supervisor.stop()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("did not happen within 5 s")


def test_restarts_wait_longer_and_longer_and_soon_again_after_one_that_served(
    waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    dies_early = ([OPENED], False)
    stays = ([OPENED, Ready()], True)
    launcher = Launcher(stays, *[dies_early] * 7, stays)

    async def use(supervisor: EngineSupervisor) -> None:
        launcher.started[0].die()
        await until(lambda: len(launcher.started) == 9 and supervisor.state.word == "ready")
        assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
        launcher.started[-1].die()  # it was ready, and served nobody
        await until(lambda: len(launcher.started) == 10 and supervisor.state.word == "ready")
        assert waits[8:] == [30]
        launcher.started[-1].answer(Stepped((finished_output(),), NO_STATS))
        await until(lambda: supervisor._has_served)
        launcher.started[-1].die()
        await until(lambda: len(launcher.started) == 11)
        assert waits[9:] == [1]
        assert supervisor.num_restarts == 10

    supervised(launcher, use)
    assert "its process ended with exit code 1; another is started in 1 s" in caplog.text


def finished_output() -> Any:
    from quantpipe.engine.request import FinishReason, StepOutput

    return StepOutput("a", (1,), (), FinishReason.LENGTH)


def test_the_reason_stays_until_the_next_one_is_ready(waits: list[float]) -> None:
    fails = ([failure_of(ArtifactError("folder: gone"))], False)
    launcher = Launcher(([OPENED, Ready()], True), fails, fails, ([OPENED], True))
    lost: list[tuple[str, str]] = []

    async def use(supervisor: EngineSupervisor) -> None:
        assert (supervisor.state.word, supervisor.failure) == ("ready", None)
        launcher.started[0].die()
        await until(lambda: bool(lost))
        await until(lambda: len(launcher.started) == 4 and supervisor.state.word == "starting")
        assert supervisor.state.reason == "the engine cannot be started again: folder: gone"
        assert lost == [("the engine failed (its process died) and is started again; try again later", "failed")]
        launcher.started[-1].answer(Ready())
        await until(lambda: supervisor.state.word == "ready")
        assert supervisor.failure is None and supervisor.state.reason is None

    supervised(launcher, use, lost)


def test_one_that_does_not_answer_is_stalled_then_killed_then_replaced(waits: list[float]) -> None:
    launcher = Launcher(([OPENED, Ready()], True))
    lost: list[tuple[str, str]] = []

    async def use(supervisor: EngineSupervisor) -> None:
        await until(lambda: supervisor.state.word == "stalled")
        assert supervisor.state.still_s > FAST.stalled_s
        launcher.started[0].answer(Pong(None))
        await until(lambda: supervisor.state.word == "ready")
        await until(lambda: launcher.started[0].was_killed)
        await until(lambda: len(launcher.started) == 2 and supervisor.state.word == "ready")
        assert "did not move for" in lost[0][0] and supervisor.state.still_s == 0

    supervised(launcher, use, lost)


def test_a_first_engine_that_cannot_start_is_raised_and_not_tried_again(waits: list[float]) -> None:
    async def never(supervisor: EngineSupervisor) -> None:
        raise AssertionError("it started")

    launcher = Launcher(([failure_of(ArtifactError("folder: damaged"))], False))
    with pytest.raises(ArtifactError, match="folder: damaged"):
        supervised(launcher, never)
    assert len(launcher.started) == 1
    for messages in ([], [OPENED]):
        with pytest.raises(QuantpipeError, match="folder: the engine's process ended with exit code 1 before it was"):
            supervised(Launcher((messages, False)), never)


def test_starting_again_what_was_started_changes_nothing_even_while_another_is_awaited(waits: list[float]) -> None:
    launcher = Launcher(([OPENED, Ready()], True), ([Opened(EngineFacts(64))], True))

    async def use(supervisor: EngineSupervisor) -> None:
        await supervisor.start()
        assert supervisor.facts == OPENED.facts
        launcher.started[0].die()
        await until(lambda: supervisor.failure is not None)
        await supervisor.start()
        await until(lambda: supervisor.facts == EngineFacts(64))
        assert supervisor.state.word == "starting" and len(launcher.started) == 2

    supervised(launcher, use)


def test_one_that_loads_for_ever_is_killed_and_the_next_start_may_do_better(waits: list[float]) -> None:
    limits = WatchLimits(FAST.stalled_s, FAST.hung_s, load_s=0.3)
    launcher = Launcher(([OPENED, Ready()], True), ([], True), ([OPENED], True), ([OPENED, Ready()], True))

    async def use(supervisor: EngineSupervisor) -> None:
        launcher.started[0].die()
        await until(lambda: len(launcher.started) == 4 and supervisor.state.word == "ready")
        assert [script.was_killed for script in launcher.started] == [False, True, True, False]

    supervised(launcher, use, limits=limits)


def test_a_first_engine_that_loads_for_ever_is_one_line_that_says_which_option(waits: list[float]) -> None:
    async def never(supervisor: EngineSupervisor) -> None:
        raise AssertionError("it started")

    for messages in ([], [OPENED]):
        launcher = Launcher((messages, True))
        with pytest.raises(QuantpipeError, match=r"folder: the engine was not ready within 0.2 s .*--load-s"):
            supervised(launcher, never, limits=WatchLimits(load_s=0.2))
        assert launcher.started[0].was_killed


def test_whoever_is_turned_away_meanwhile_is_told_what_is_left_of_the_pause() -> None:
    launcher = Launcher(([OPENED, Ready()], True), *[([OPENED], False)] * 3, ([OPENED, Ready()], True))

    async def use(supervisor: EngineSupervisor) -> None:
        assert supervisor.state.retry_after_s == 1
        supervisor._backoff.start_s = 20.0  # as if the first start had taken that long
        launcher.started[0].die()
        await until(lambda: supervisor._connection is None)
        assert supervisor.state.retry_after_s in (20, 21)
        await until(lambda: supervisor.state.retry_after_s == 20)

    supervised(launcher, use)


def test_stopping_ends_the_process_and_starts_no_other(waits: list[float]) -> None:
    launcher = Launcher(([OPENED, Ready()], True))
    lost: list[tuple[str, str]] = []

    async def use(supervisor: EngineSupervisor) -> None:
        await asyncio.sleep(0)

    supervised(launcher, use, lost)
    assert len(launcher.started) == 1 and launcher.started[0].was_killed and not lost
