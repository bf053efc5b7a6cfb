"""Has a second model answer what the first one answers, and compares. Never slows or fails the first one's answer.

What it does for a request is a task of its own. It is dropped where the shadow is behind or has no engine, and given up
where the first answer never comes to its end: the client left, or its arm failed.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from quantpipe.engine.sampling_params import SamplingParams
from quantpipe.errors import QuantpipeError
from quantpipe.serve.api import GenerationRequest
from quantpipe.serve.exchange import Exchange
from quantpipe.serve.generation import ChoiceText, text_deltas
from quantpipe.serve.response_body import Deltas
from quantpipe.serve.service import Service
from quantpipe.serve.shadow.comparison import AnswerRecord, compared
from quantpipe.serve.shadow.log import log_shadow
from quantpipe.serve.shadow.metrics import Outcome, ShadowMetrics
from quantpipe.serve.shadow.options import ShadowOptions
from quantpipe.serve.submission import AbortedError, PromptJob, Submission

logger = logging.getLogger(__name__)

Encode = Callable[[Service], list[list[int]]]  # the prompts of a request, as a model reads them


class Shadow:
    """The model of ``service``, following one whose tokens mean the same, or do not (``has_same_tokens``)."""

    def __init__(self, service: Service, metrics: ShadowMetrics, options: ShadowOptions, has_same_tokens: bool) -> None:
        self.service = service
        self.metrics = metrics
        self.has_same_tokens = has_same_tokens
        # One thread, so that long prompts of the shadow never take those that the first arm's are encoded in.
        self.thread = ThreadPoolExecutor(1, "shadow")
        self._options = options
        self._random = random.Random(options.seed)
        self._num_open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def follower(self, body: GenerationRequest, exchange: Exchange, encode: Encode) -> "ShadowedRequest | None":
        """Who follows a request; None where it is not among those that are to be followed."""
        if body.max_tokens == 0 or self._random.random() >= self._options.share:
            return None
        return ShadowedRequest(self, body, exchange, encode)

    def has_room(self, num_choices: int) -> bool:
        """Whether so many choices more can be worked on now."""
        is_ready = self.service.engine_loop.state.word == "ready"
        return is_ready and self._num_open + num_choices <= self._options.max_open

    def begin(self, run: Coroutine[Any, Any, None], num_choices: int) -> None:
        """Do what is done for a request, beside what its client waits for."""

        def end(task: asyncio.Task[None]) -> None:
            self._num_open -= num_choices
            self._tasks.discard(task)

        self._num_open += num_choices
        task = asyncio.create_task(run)
        self._tasks.add(task)
        task.add_done_callback(end)


@dataclass(frozen=True)
class ShadowedRequest:
    """One request that is followed."""

    shadow: Shadow
    body: GenerationRequest
    exchange: Exchange
    encode: Encode

    def follow(
        self, submission: Submission, choices: Sequence[ChoiceText], skips_special_tokens: bool, deltas: Deltas
    ) -> Deltas:
        """See ``service.Follower``."""
        if not self.shadow.has_room(len(choices)):
            self._count("dropped")
            return deltas
        first = AnswerRecord(choices, submission.submitted_s)
        is_whole: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not is_whole.done():
                is_whole.set_result(first.is_complete)

        self.exchange.at_end(end)
        self.shadow.begin(self._run(submission.jobs, first, is_whole, skips_special_tokens), len(choices))
        return first.noted(deltas)

    async def _run(
        self,
        jobs: Sequence[PromptJob],
        first: AnswerRecord,
        is_whole: asyncio.Future[bool],
        skips_special_tokens: bool,
    ) -> None:
        """Answer it, wait for the end of the first answer, compare. Raises nothing."""
        answering = asyncio.create_task(self._answer(jobs, skips_special_tokens))
        answering.add_done_callback(_look_at)
        try:
            await asyncio.wait((answering, is_whole), return_when=asyncio.FIRST_COMPLETED)
            if is_whole.done() and not is_whole.result():
                self._count("abandoned")
                return
            second = await answering
            if await is_whole:
                self._compare(jobs[0].params, first, second)
            else:
                self._count("abandoned")
        except QuantpipeError as error:
            self._count("failed", type(error).__name__)
        except Exception as error:
            logger.exception("a shadow failed")
            self._count("failed", type(error).__name__)
        finally:
            answering.cancel()

    async def _answer(self, jobs: Sequence[PromptJob], skips_special_tokens: bool) -> AnswerRecord:
        """What the shadow makes of the request: with its own tokens, and the same parameters."""
        service = self.shadow.service
        prompts = await asyncio.get_running_loop().run_in_executor(self.shadow.thread, self.encode, service)
        own = [
            PromptJob(tuple(prompt_ids), replace(job.params, logprobs=None, prompt_logprobs=None), job.cache_salt)
            for prompt_ids, job in zip(prompts, jobs, strict=True)
        ]
        submission = await service.engine_loop.submit(own)
        texts = [
            ChoiceText(service.tokenizer.stream(skips_special_tokens), self.body.stops, self.body.min_tokens or 0)
            for _ in submission.samples
        ]
        answer = AnswerRecord(texts, submission.submitted_s)
        try:
            await answer.read(text_deltas(submission, texts))
        finally:
            submission.end(AbortedError("nobody compares it any more"))
        return answer

    def _compare(self, params: SamplingParams, first: AnswerRecord, second: AnswerRecord) -> None:
        metrics = self.shadow.metrics
        metrics.observe_times((first.choices, second.choices))
        choices = compared(first, second, self.shadow.has_same_tokens) if _is_comparable(params) else ()
        metrics.observe_texts(choices)
        outcome: Outcome = "compared" if choices else "not_comparable"
        metrics.count(outcome)
        log_shadow(self.exchange.request_id, outcome, (first, second), choices)

    def _count(self, outcome: Outcome, error: str | None = None) -> None:
        self.shadow.metrics.count(outcome)
        log_shadow(self.exchange.request_id, outcome, error=error)


def _look_at(task: asyncio.Task[AnswerRecord]) -> None:
    """So that asyncio does not complain of an error that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _is_comparable(params: SamplingParams) -> bool:
    """Whether two equal models would answer the same: both choose the likeliest token, or both draw by one seed."""
    return params.temperature == 0 or params.top_k == 1 or params.seed is not None
