"""The thread that owns the engine, and the way in and out of it for asyncio. Knows no HTTP and no text.

One thread calls the engine; asyncio code reaches it only through an inbox guarded by a condition, on which the thread
sleeps while there is nothing to do. Results travel back with ``call_soon_threadsafe``, once per engine step. Which
submissions are open and whether the engine failed is touched by the event loop's thread only.
"""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from quantpipe.engine.request import QosClass, SamplingParams, StepOutput
from quantpipe.engine.stats import EngineStats
from quantpipe.errors import QuantpipeError, RequestError
from quantpipe.serve.submission import (
    AbortedError,
    EngineFailedError,
    EngineSample,
    PromptJob,
    Submission,
    UnavailableError,
)

logger = logging.getLogger(__name__)

STEP_LIMIT_S = 30.0  # no step of a healthy engine takes this long


class SteppedEngine(Protocol):
    """The part of ``Engine`` that serving uses."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def has_unfinished(self) -> bool: ...
    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        qos: QosClass = "standard",
        deadline_s: float | None = None,
        max_queue_s: float | None = None,
    ) -> str: ...
    def abort(self, request_id: str) -> None: ...
    def abort_sample(self, request_id: str, index: int) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def stats(self) -> EngineStats: ...


class EngineLoop:
    """Runs an engine in its own thread. ``start`` it from the event loop that will submit to it.

    At most ``max_open_prompts`` wait or run at a time, each sample of a prompt counted; more are refused.
    ``failure`` is None until the engine breaks. ``is_closed`` is set once no new requests are taken. ``stats`` is the
    engine's state after its latest step.
    """

    def __init__(self, engine: SteppedEngine, max_open_prompts: int = 256) -> None:
        self.max_model_len = engine.max_model_len
        self.max_open_prompts = max_open_prompts
        self.stats = engine.stats()
        self.failure: str | None = None
        self.is_closed = False
        self._engine = engine
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._wakeup = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._is_stopping = False
        # Of each request the samples that someone reads, and as which choice. The engine's thread only.
        self._routes: dict[str, dict[int, tuple[Submission, int]]] = {}
        self._submissions: set[Submission] = set()  # the event loop only
        self._names = itertools.count()

    def start(self) -> None:
        """Start the engine's thread."""
        self._event_loop = asyncio.get_running_loop()
        self._is_empty = asyncio.Event()
        self._thread.start()

    @property
    def num_open_prompts(self) -> int:
        """Prompts that wait or run, each sample counted."""
        return sum(len(submission.unfinished) for submission in self._submissions)

    async def submit(self, jobs: Sequence[PromptJob]) -> Submission:
        """Hand prompts to the engine, all or none, and wait until it has accepted them.

        Raises RequestError if one can never run, UnavailableError if the queue is full or the server is closing.
        """
        self._check_room(sum(job.params.n for job in jobs))
        submission = Submission(f"request-{next(self._names)}", jobs, self._abort_in_engine, self._forget)
        self._submissions.add(submission)
        self._send(partial(self._add, submission))
        try:
            await submission.accepted
        except asyncio.CancelledError:
            submission.end(AbortedError("the request was cancelled"))
            raise
        return submission

    async def drain(self, drain_s: float) -> None:
        """Take no new requests, give the open ones ``drain_s`` seconds to finish, then end them."""
        self.is_closed = True
        if not self._submissions:
            return
        try:
            await asyncio.wait_for(self._is_empty.wait(), drain_s)
        except TimeoutError:
            self.end_all(UnavailableError("the server is shutting down", "shutting_down"))

    async def stop(self) -> None:
        """End what is still open, then the engine's thread, which first completes its step; a stuck one is left."""
        self.is_closed = True
        self.end_all(UnavailableError("the server is shutting down", "shutting_down"))
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        await asyncio.to_thread(self._thread.join, STEP_LIMIT_S)

    def end_all(self, reason: QuantpipeError) -> None:
        """End every open submission with ``reason``."""
        for submission in tuple(self._submissions):
            submission.end(reason)

    def _check_room(self, num_prompts: int) -> None:
        if self.failure is not None:
            raise UnavailableError(self.failure, "engine_failed")
        if self.is_closed:
            raise UnavailableError("the server is shutting down", "shutting_down")
        if num_prompts > self.max_open_prompts:
            raise RequestError(f"{num_prompts} choices in one request; at most {self.max_open_prompts} fit", "prompt")
        num_open = self.num_open_prompts
        if num_open + num_prompts > self.max_open_prompts:
            raise UnavailableError(f"the queue is full ({num_open} open prompts); try again later", "queue_full")

    def _forget(self, submission: Submission) -> None:
        self._submissions.discard(submission)
        if self.is_closed and not self._submissions:
            self._is_empty.set()

    def _fail(self, error: Exception) -> None:
        self.failure = f"the engine failed ({type(error).__name__}); the server must be restarted"
        self.end_all(EngineFailedError(self.failure))

    def _abort_in_engine(self, samples: Sequence[EngineSample]) -> None:
        self._send(partial(self._abort, tuple(samples)))

    def _send(self, command: Callable[[], None]) -> None:
        with self._wakeup:
            self._inbox.append(command)
            self._wakeup.notify()

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    command()
                self.stats = self._engine.stats()  # a step may take long: what has just come shows before it
                outputs = self._engine.step() if self._engine.has_unfinished else []
                self.stats = self._engine.stats()
                self._route(outputs)
        except Exception as error:
            logger.exception("the engine failed")
            self._post(partial(self._fail, error))

    def _next_commands(self) -> list[Callable[[], None]] | None:
        """What has arrived; sleeps while there is nothing to do; None when it is time to stop."""
        with self._wakeup:
            while not (self._inbox or self._is_stopping or self._engine.has_unfinished):
                self._wakeup.wait()
            if self._is_stopping:
                return None
            commands, self._inbox = self._inbox, []
            return commands

    def _add(self, submission: Submission) -> None:
        for number, (job, request_id) in enumerate(zip(submission.jobs, submission.request_ids, strict=True)):
            try:
                self._engine.add(
                    job.prompt_ids,
                    job.params,
                    request_id,
                    cache_salt=job.cache_salt,
                    priority=job.priority,
                    qos=job.qos,
                    deadline_s=job.deadline_s,
                    max_queue_s=job.max_queue_s,
                )
            except RequestError as error:
                for earlier in submission.request_ids[:number]:
                    del self._routes[earlier]
                    self._engine.abort(earlier)
                self._post(partial(submission.accept, error))
                return
            self._routes[request_id] = {}
        for choice, (request_id, index) in enumerate(submission.samples):
            self._routes[request_id][index] = (submission, choice)
        self._post(partial(submission.accept, None))

    def _abort(self, samples: Sequence[EngineSample]) -> None:
        closed = [sample for sample in samples if self._close(*sample)]
        for request_id, index in closed:
            if request_id in self._routes:
                with suppress(RequestError):  # not forked yet: it will be computed with the others, and not read
                    self._engine.abort_sample(request_id, index)

    def _close(self, request_id: str, index: int) -> bool:
        """Nobody reads this sample any more, and where it is the last one, the request. False where it was closed."""
        routes = self._routes.get(request_id, {})
        if routes.pop(index, None) is None:
            return False
        if not routes:
            del self._routes[request_id]
            self._engine.abort(request_id)  # the engine would keep its output for ever
        return True

    def _route(self, outputs: Sequence[StepOutput]) -> None:
        deliveries: list[tuple[Submission, int, StepOutput]] = []
        for output in outputs:
            route = self._routes.get(output.request_id, {}).get(output.index)
            if route is None:
                continue
            deliveries.append((*route, output))
            if output.finish_reason is not None:
                self._close(output.request_id, output.index)
        if deliveries:
            self._post(partial(_deliver, deliveries))

    def _post(self, callback: Callable[[], None]) -> None:
        self._event_loop.call_soon_threadsafe(callback)


def _deliver(deliveries: Sequence[tuple[Submission, int, StepOutput]]) -> None:
    for submission, index, output in deliveries:
        submission.deliver(index, output)
