"""One client request's share of the engine, seen from asyncio. Knows no HTTP, no text and no threads."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from quantpipe.engine.request import QosClass, SamplingParams, StepOutput
from quantpipe.errors import QuantpipeError
from quantpipe.serve.admission.limits import SlowClientError

MAX_UNREAD_STEPS = 1024  # of each choice: a client further behind does not read at all
RETRY_AFTER_S = 1  # where nothing better is known
EngineSample = tuple[str, int]  # the engine's name of a request, and which of its samples


@dataclass(frozen=True)
class PromptJob:
    """One prompt of a client's request: what ``Request`` will hold of it."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    qos: QosClass = "standard"
    deadline_s: float | None = None
    max_queue_s: float | None = None


class UnavailableError(QuantpipeError):
    """The server takes no new request or gives up an old one; ``code`` says why.

    Trying again may help, in ``retry_after_s`` seconds.
    """

    def __init__(self, message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class EngineFailedError(QuantpipeError):
    """The engine broke while it held this request."""


class AbortedError(QuantpipeError):
    """The request was given up on its client's behalf."""


class Submission:
    """One or more prompts and the choices made for each, told apart by their index, from acceptance to the last output.

    ``submitted_s`` is when it was made (``time.monotonic``). ``unfinished`` holds the choices the engine still works
    on. ``abort_in_engine`` is called with the samples that it need not go on with, and ``on_closed`` once nothing is
    unfinished. Everything here runs in the event loop.
    """

    def __init__(
        self,
        name: str,
        jobs: Sequence[PromptJob],
        abort_in_engine: Callable[[Sequence[EngineSample]], None],
        on_closed: Callable[["Submission"], None],
    ) -> None:
        self.submitted_s = time.monotonic()
        self.jobs = tuple(jobs)
        self.request_ids = tuple(f"{name}-{index}" for index in range(len(jobs)))
        # The choices, in order: all of the first prompt, then all of the next.
        self.samples: tuple[EngineSample, ...] = tuple(
            (request_id, index)
            for request_id, job in zip(self.request_ids, jobs, strict=True)
            for index in range(job.params.n)
        )
        self.unfinished = set(range(len(self.samples)))
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unread = set(self.unfinished)  # choices whose last output has not been read yet
        self._events: asyncio.Queue[tuple[int, StepOutput] | QuantpipeError] = asyncio.Queue()
        self._abort_in_engine = abort_in_engine
        self._on_closed = on_closed

    async def outputs(self) -> AsyncIterator[tuple[int, StepOutput]]:
        """Step outputs with the index of their choice, until each choice is finished or aborted.

        Raises EngineFailedError, UnavailableError (shutdown) or AbortedError when the rest will never come.
        """
        while self._unread:
            event = await self._events.get()
            if isinstance(event, QuantpipeError):
                raise event
            index, output = event
            if index not in self._unread:
                continue  # aborted while this output was on its way
            if output.finish_reason is not None:
                self._unread.discard(index)
            yield index, output

    def abort(self, index: int) -> None:
        """Stop one choice; its outputs end without an error."""
        self._unread.discard(index)
        if index in self.unfinished:
            self._abort_in_engine([self.samples[index]])
            self._close(index)

    def end(self, reason: QuantpipeError) -> None:
        """Stop every choice that is not finished; whoever waits for them gets ``reason`` raised."""
        if not self.unfinished:
            return
        self._abort_in_engine([self.samples[index] for index in sorted(self.unfinished)])
        if not self.accepted.done():
            self.accepted.set_exception(reason)
        self._events.put_nowait(reason)
        self.unfinished.clear()
        self._on_closed(self)

    def accept(self, refusal: QuantpipeError | None) -> None:
        """The engine took all prompts, or none because of ``refusal``."""
        if self.accepted.done():
            return  # ended meanwhile
        if refusal is None:
            self.accepted.set_result(None)
            return
        self.accepted.set_exception(refusal)
        self.unfinished.clear()
        self._on_closed(self)

    def deliver(self, index: int, output: StepOutput) -> None:
        """One step's output for one choice."""
        if index not in self.unfinished:
            return
        self._events.put_nowait((index, output))
        if output.finish_reason is not None:
            self._close(index)
        elif self._events.qsize() > MAX_UNREAD_STEPS * len(self.samples):
            self.end(SlowClientError(f"the client is {MAX_UNREAD_STEPS:,} steps behind its stream; read faster"))

    def _close(self, index: int) -> None:
        self.unfinished.discard(index)
        if not self.unfinished:
            self._on_closed(self)
