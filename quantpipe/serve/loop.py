"""The thread that owns the engine: takes messages, computes steps, sends what came of them. Knows no HTTP and no text.

It sleeps on its inbox while there is nothing to do. Who reads the messages and where they go is the caller's affair.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from quantpipe.engine.request import QosClass, SamplingParams, StepOutput
from quantpipe.engine.stats import EngineStats
from quantpipe.errors import RequestError
from quantpipe.serve.engine_process.messages import Abort, Accepted, Add, FromEngine, Stepped
from quantpipe.serve.submission import EngineSample


class SteppedEngine(Protocol):
    """The part of ``Engine`` that serving uses."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def has_unfinished(self) -> bool: ...
    def compiled(self, params: SamplingParams) -> object: ...
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


class Inbox:
    """What has arrived for the engine's thread, which sleeps on it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Add | Abort] = []
        self._is_closed = False

    def put(self, message: Add | Abort) -> None:
        """Add a message and wake who waits for one."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def close(self) -> None:
        """Nothing more will come."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self, may_wait: bool) -> list[Add | Abort] | None:
        """All that has arrived, at least one message where it ``may_wait``; None once the inbox is closed."""
        with self._changed:
            while may_wait and not (self._messages or self._is_closed):
                self._changed.wait()
            if self._is_closed:
                return None
            messages, self._messages = self._messages, []
            return messages


class EngineLoop:
    """Runs an engine in the thread that calls ``run``, until ``inbox`` is closed.

    ``round`` tells other threads whether it moves: the number of the turn it is in, messages and one step; None while
    it sleeps.
    """

    def __init__(self, engine: SteppedEngine, inbox: Inbox, send: Callable[..., None]) -> None:
        self.round: int | None = None
        self._engine = engine
        self._inbox = inbox
        self._send = send  # takes any number of messages
        self._read: dict[str, set[int]] = {}  # of each request, the samples that someone reads

    def run(self) -> None:
        """Take turns. Whatever the engine raises, but for refusals of requests, passes through."""
        for number in itertools.count():
            if not self._engine.has_unfinished:
                self.round = None
            messages = self._inbox.take(may_wait=not self._engine.has_unfinished)
            if messages is None:
                return
            self.round = number
            replies = [reply for message in messages if (reply := self._obey(message)) is not None]
            if messages:  # a step may take long: what has just come shows before it
                self._send(*replies, Stepped((), self._engine.stats()))
            if self._engine.has_unfinished:
                outputs = self._readable(self._engine.step())
                self._send(Stepped(outputs, self._engine.stats()))

    def refusal(self, message: Add) -> Accepted | None:
        """Why prompts cannot be continued as their grammar says; it is compiled here, for ``run`` to find it.

        For another thread than that of ``run``: so it does not keep the other requests waiting.
        """
        params = message.jobs[0].params  # those of one message share a grammar
        if params.grammar is None:
            return None
        try:
            self._engine.compiled(params)
        except RequestError as error:
            return Accepted(message.request_ids[0], str(error), error.param)
        return None

    def _obey(self, message: Add | Abort) -> FromEngine | None:
        if isinstance(message, Add):
            return self._add(message)
        self._abort(message.samples)
        return None

    def _add(self, message: Add) -> Accepted:
        for number, (request_id, job) in enumerate(zip(message.request_ids, message.jobs, strict=True)):
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
                for earlier in message.request_ids[:number]:
                    del self._read[earlier]
                    self._engine.abort(earlier)
                return Accepted(message.request_ids[0], str(error), error.param)
            self._read[request_id] = set(range(job.params.n))
        return Accepted(message.request_ids[0])

    def _abort(self, samples: Sequence[EngineSample]) -> None:
        closed = [sample for sample in samples if self._close(*sample)]
        for request_id, index in closed:
            if request_id in self._read:
                with suppress(RequestError):  # not forked yet: it will be computed with the others, and not read
                    self._engine.abort_sample(request_id, index)

    def _close(self, request_id: str, index: int) -> bool:
        """Nobody reads this sample any more, and where it is the last one, the request. False where it was closed."""
        indices = self._read.get(request_id, set())
        if index not in indices:
            return False
        indices.discard(index)
        if not indices:
            del self._read[request_id]
            self._engine.abort(request_id)  # the engine would keep its output for ever
        return True

    def _readable(self, outputs: Sequence[StepOutput]) -> tuple[StepOutput, ...]:
        """Those that someone reads; samples that end with them are closed."""
        readable = tuple(output for output in outputs if output.index in self._read.get(output.request_id, ()))
        for output in readable:
            if output.finish_reason is not None:
                self._close(output.request_id, output.index)
        return readable
