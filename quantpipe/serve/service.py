"""One request from its parsed body to its response: encode, submit, watch the client, render."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest, GenerationRequest
from quantpipe.serve.api_errors import ModelNotFoundError, problem_of
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.exchange import exchange_of
from quantpipe.serve.generation import ChoiceText, TextDelta, text_deltas
from quantpipe.serve.loop import EngineLoop
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.render import ChatRenderer, CompletionRenderer, Renderer, WholeChoice
from quantpipe.serve.replies import PromptTokensDetails, Usage
from quantpipe.serve.submission import AbortedError, PromptJob, Submission

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; chat completions may use what is left of the context
CHAT_PARAMS = {"prompt": "messages", "logprobs": "top_logprobs"}  # the engine's words -> the client's
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Deltas = AsyncIterator[tuple[int, TextDelta]]


@dataclass(frozen=True)
class Service:
    """What all requests to one served model share."""

    engine_loop: EngineLoop
    tokenizer: Tokenizer
    model_name: str
    template: ChatTemplate | None
    metrics: ServerMetrics
    _watchers: set[asyncio.Task[None]] = field(default_factory=set)

    async def complete(self, body: CompletionRequest, http_request: Request) -> Response:
        """Answer ``/v1/completions``: ``n`` choices per prompt."""
        exchange_of(http_request).model = body.model
        self.check_model(body.model)
        prompts = await asyncio.to_thread(self._encode_prompts, body)
        jobs = [self._job(ids, body, body.max_tokens, DEFAULT_COMPLETION_TOKENS, body.logprobs) for ids in prompts]
        renderer = CompletionRenderer(self.model_name, self.tokenizer, body.logprobs)
        return await self._answer(jobs, body, http_request, renderer)

    async def chat(self, body: ChatCompletionRequest, http_request: Request) -> Response:
        """Answer ``/v1/chat/completions``: ``n`` choices."""
        exchange_of(http_request).model = body.model
        self.check_model(body.model)
        prompt_ids = await asyncio.to_thread(self._encode_messages, body)
        max_tokens = body.max_completion_tokens or body.max_tokens
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        job = self._job(prompt_ids, body, max_tokens, self.engine_loop.max_model_len, num_logprobs)
        renderer = ChatRenderer(self.model_name, self.tokenizer, num_logprobs is not None, body.n or 1)
        try:
            return await self._answer([job], body, http_request, renderer)
        except RequestError as error:
            raise RequestError(str(error), CHAT_PARAMS.get(error.param or "", error.param)) from error

    def check_model(self, name: str) -> None:
        """Raise ModelNotFoundError unless ``name`` is the served model."""
        if name != self.model_name:
            raise ModelNotFoundError(f"model '{name}' is not served here; this server serves '{self.model_name}'")

    def _encode_prompts(self, body: CompletionRequest) -> list[list[int]]:
        encode = self.tokenizer.encode
        return [encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in body.prompts]

    def _encode_messages(self, body: ChatCompletionRequest) -> list[int]:
        """The template writes the special tokens itself, so that encoding must add none."""
        if self.template is None:
            raise RequestError(f"model '{self.model_name}' has no chat template; use /v1/completions", "messages")
        return self.tokenizer.encode(self.template.render([message.for_template() for message in body.messages]))

    def _job(
        self,
        prompt_ids: Sequence[int],
        body: GenerationRequest,
        max_tokens: int | None,
        default: int,
        num_logprobs: int | None,
    ) -> PromptJob:
        """A limit the client did not set is cut to what fits; one it did set is the engine's to refuse."""
        if max_tokens is None:
            max_tokens = max(1, min(default, self.engine_loop.max_model_len - len(prompt_ids)))
        return PromptJob(
            tuple(prompt_ids),
            body.sampling_params(max_tokens, num_logprobs),
            body.cache_salt or "",
            body.priority or 0,
            body.qos or "standard",
            body.deadline_s,
            body.max_queue_s,
        )

    async def _answer(
        self, jobs: Sequence[PromptJob], body: GenerationRequest, http_request: Request, renderer: Renderer
    ) -> Response:
        exchange = exchange_of(http_request)
        submission = await self.engine_loop.submit(exchange.admit(jobs))
        exchange.begin(submission)
        watcher = asyncio.create_task(_end_on_disconnect(http_request, submission))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        num_choices = len(submission.samples)
        choices = [ChoiceText(self.tokenizer.stream(), body.stops, body.min_tokens or 0) for _ in range(num_choices)]
        deltas = exchange.watch(self.metrics.observe(text_deltas(submission, choices), num_choices))
        num_prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        if body.stream:
            if body.max_queue_ms is not None:
                deltas = await _begun(deltas)
            events = _events(deltas, renderer, num_prompt_tokens, body.include_usage)
            return StreamingResponse(events, headers=STREAM_HEADERS, media_type="text/event-stream")
        whole = await _whole(deltas, num_choices, renderer, num_prompt_tokens)
        return Response(whole, media_type="application/json")


async def _end_on_disconnect(http_request: Request, submission: Submission) -> None:
    """Wait until the client is gone (the server says so after the response, too) and end what is left."""
    while (await http_request.receive())["type"] != "http.disconnect":
        pass
    submission.end(AbortedError("the client closed the connection"))


async def _begun(deltas: Deltas) -> Deltas:
    """The same deltas, once there is one: what waits in vain for its turn is refused with a status of its own."""
    first = await anext(deltas)

    async def all_deltas() -> Deltas:
        yield first
        async for delta in deltas:
            yield delta

    return all_deltas()


async def _whole(deltas: Deltas, num_choices: int, renderer: Renderer, num_prompt_tokens: int) -> str:
    """The JSON of the reply that is not streamed, from the same deltas a stream is made of."""
    parts: list[list[TextDelta]] = [[] for _ in range(num_choices)]
    async for index, delta in deltas:
        parts[index].append(delta)
    choices = [
        WholeChoice(
            text="".join(delta.text for delta in own),
            tokens=tuple(token for delta in own for token in delta.tokens),
            finish_reason=own[-1].finish_reason or "stop",
        )
        for own in parts
    ]
    usage = _usage(num_prompt_tokens, [own[-1] for own in parts])
    return renderer.whole(choices, usage).model_dump_json()


async def _events(
    deltas: Deltas, renderer: Renderer, num_prompt_tokens: int, include_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events: chunks, then the usage if wanted, or an error in place of what is missing; then [DONE]."""
    latest: dict[int, TextDelta] = {}
    try:
        for chunk in renderer.opening_chunks():
            yield _event(chunk.model_dump_json().encode())
        async for index, delta in deltas:
            latest[index] = delta
            for chunk in renderer.delta_chunks(index, delta):
                yield _event(chunk.model_dump_json().encode())
        if include_usage:
            chunk = renderer.usage_chunk(_usage(num_prompt_tokens, latest.values()))
            yield _event(chunk.model_dump_json().encode())
    except Exception as error:
        problem = problem_of(error)
        if problem.code == "internal_error":
            logger.exception("a stream failed")
        yield _event(problem.body())
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _usage(num_prompt_tokens: int, latest: Iterable[TextDelta]) -> Usage:
    """From the latest delta of each choice."""
    latest = tuple(latest)
    num_tokens = sum(delta.num_tokens for delta in latest)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_tokens,
        total_tokens=num_prompt_tokens + num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(delta.num_cached_tokens for delta in latest)),
    )
