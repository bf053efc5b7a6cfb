"""The front's view of an engine in another process: submission, delivery, shutdown. Knows no HTTP and no text.

Which submissions are open is touched by the event loop's thread only. Several clients may live side by side, each with
an engine of its own.
"""

import asyncio
import itertools
from collections.abc import Sequence

from quantpipe.engine.stats import EngineStats
from quantpipe.errors import QuantpipeError, RequestError
from quantpipe.serve.engine_process.launch import Launch, launch_engine
from quantpipe.serve.engine_process.messages import Abort, Accepted, Add, EngineFacts, FromEngine, Opening, Stepped
from quantpipe.serve.engine_process.supervisor import EngineState, EngineSupervisor
from quantpipe.serve.engine_process.watch import WatchLimits
from quantpipe.serve.engine_process.wire import can_be_sent, encode
from quantpipe.serve.submission import (
    AbortedError,
    EngineFailedError,
    EngineSample,
    PromptJob,
    Submission,
    UnavailableError,
)

NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)


class EngineClient:
    """An engine in a process of its own, which loads ``opening``; one that dies or hangs is replaced.

    At most ``max_open_prompts`` wait or run at a time, each sample of a prompt counted; more are refused.
    ``is_closed`` is set once no new requests are taken. ``stats`` is the engine's state after its latest step; while
    there is no engine it holds nothing.
    """

    def __init__(
        self,
        opening: Opening,
        max_open_prompts: int = 256,
        limits: WatchLimits | None = None,
        launch: Launch = launch_engine,
    ) -> None:
        self.max_open_prompts = max_open_prompts
        self.stats = NO_STATS
        self.is_closed = False
        self._supervisor = EngineSupervisor(launch, opening, limits or WatchLimits(), self._receive, self._lose)
        self._submissions: dict[str, Submission] = {}  # by the name of the first prompt
        self._choices: dict[EngineSample, tuple[Submission, int]] = {}
        self._names = itertools.count()
        self._is_empty = asyncio.Event()

    @property
    def facts(self) -> EngineFacts:
        """What is known of the engine, once it is open."""
        if self._supervisor.facts is None:
            raise QuantpipeError("engine: not open yet; this is a bug")
        return self._supervisor.facts

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        return self.facts.max_model_len

    @property
    def state(self) -> EngineState:
        """How the engine fares at this moment."""
        return self._supervisor.state

    @property
    def failure(self) -> str | None:
        """Why there is no engine that takes requests; None while there is one."""
        return self._supervisor.failure

    @property
    def num_open_prompts(self) -> int:
        """Prompts that wait or run, each sample counted."""
        return sum(len(submission.unfinished) for submission in self._submissions.values())

    def launch(self) -> None:
        """Start the process, for it to load while others prepare. Needs no event loop."""
        self._supervisor.launch()

    def kill(self) -> None:
        """Leave no process behind, whatever happened before. Needs no event loop."""
        self._supervisor.kill()

    async def open(self) -> None:
        """Wait until the model is loaded. Raises what ``Engine.open`` would; QuantpipeError for a process that died."""
        await self._supervisor.open()

    async def start(self) -> None:
        """Open the engine and wait until it is warm, unless that was done. Raises as ``open`` does."""
        await self._supervisor.start()

    async def submit(self, jobs: Sequence[PromptJob]) -> Submission:
        """Hand prompts to the engine, all or none, and wait until it has accepted them.

        Raises RequestError if one can never run, UnavailableError if the queue is full or the server is closing.
        """
        self._check_room(sum(job.params.n for job in jobs))
        submission = Submission(f"request-{next(self._names)}", jobs, self._abort_in_engine, self._forget)
        try:
            framed = encode(Add(submission.request_ids, submission.jobs))
        except OverflowError:
            raise _beyond_64_bits(jobs) from None
        self._submissions[submission.request_ids[0]] = submission
        self._choices |= {sample: (submission, choice) for choice, sample in enumerate(submission.samples)}
        self._supervisor.send(framed)
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
        """End what is still open, then the engine's process, whatever it computes."""
        self.is_closed = True
        self.end_all(UnavailableError("the server is shutting down", "shutting_down"))
        await self._supervisor.stop()

    def end_all(self, reason: QuantpipeError) -> None:
        """End every open submission with ``reason``."""
        for submission in tuple(self._submissions.values()):
            submission.end(reason)

    def _check_room(self, num_prompts: int) -> None:
        if self.is_closed:
            raise UnavailableError("the server is shutting down", "shutting_down")
        if self.failure is not None:
            raise UnavailableError(self.failure, "engine_failed", self.state.retry_after_s)
        if num_prompts > self.max_open_prompts:
            raise RequestError(f"{num_prompts} choices in one request; at most {self.max_open_prompts} fit", "prompt")
        num_open = self.num_open_prompts
        if num_open + num_prompts > self.max_open_prompts:
            raise UnavailableError(f"the queue is full ({num_open} open prompts); try again later", "queue_full")

    def _forget(self, submission: Submission) -> None:
        self._submissions.pop(submission.request_ids[0], None)
        for sample in submission.samples:
            self._choices.pop(sample, None)
        if self.is_closed and not self._submissions:
            self._is_empty.set()

    def _abort_in_engine(self, samples: Sequence[EngineSample]) -> None:
        self._supervisor.send(encode(Abort(tuple(samples))))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Stepped(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    found = self._choices.get((output.request_id, output.index))
                    if found is not None:  # else it was given up while this output was on its way
                        submission, choice = found
                        submission.deliver(choice, output)
            case Accepted(request_id=request_id, refusal=refusal, param=param):
                waiting = self._submissions.get(request_id)
                if waiting is not None:
                    waiting.accept(None if refusal is None else RequestError(refusal, param))

    def _lose(self, reason: str) -> None:
        self.stats = NO_STATS
        self.end_all(EngineFailedError(reason))


def _beyond_64_bits(jobs: Sequence[PromptJob]) -> RequestError:
    """The refusal of prompts that cannot be sent, naming the first parameter that cannot."""
    fields = [field for job in jobs for field in (("prompt", job.prompt_ids), *vars(job.params).items())]
    param = next((name for name, value in fields if not can_be_sent(value)), None)
    return RequestError(f"{param or 'the request'}: a whole number of more than 64 bits is in no range here", param)
