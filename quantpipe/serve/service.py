"""One request from its parsed body to its response: encode, submit, watch the client, render."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from quantpipe.engine.constraint import ConstraintCompiler, Grammar
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest, GenerationRequest
from quantpipe.serve.api_errors import ModelNotFoundError, problem_of
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.echo import EchoedPrompt, echoed
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.exchange import exchange_of
from quantpipe.serve.fields import shown_name
from quantpipe.serve.generation import ChoiceText, TextDelta, text_deltas
from quantpipe.serve.messages import ChatMessage
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.render import ChatRenderer, CompletionRenderer, Renderer, WholeChoice
from quantpipe.serve.replies import Detokenized, PromptTokensDetails, Tokenized, Usage
from quantpipe.serve.submission import AbortedError, PromptJob, Submission
from quantpipe.serve.tokenize_api import DetokenizeRequest, TokenizeRequest
from quantpipe.serve.tools.request_tools import RequestTools, ToolSupport

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; chat completions may use what is left of the context
CHAT_PARAMS = {"prompt": "messages", "logprobs": "top_logprobs"}  # the engine's words -> the client's
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Deltas = AsyncIterator[tuple[int, TextDelta]]


class Wanted(NamedTuple):
    """What the endpoints word differently: the most new tokens (or a default), log-probabilities, and a grammar."""

    max_tokens: int | None
    default: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Service:
    """What all requests to one served model share."""

    engine_loop: EngineClient
    tokenizer: Tokenizer
    model_name: str
    template: ChatTemplate | None
    metrics: ServerMetrics
    compiler: ConstraintCompiler
    tool_support: ToolSupport
    _compiling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _watchers: set[asyncio.Task[None]] = field(default_factory=set)

    async def complete(self, body: CompletionRequest, http_request: Request) -> Response:
        """Answer ``/v1/completions``: ``n`` choices per prompt."""
        exchange_of(http_request).model = body.model
        self.check_model(body.model)
        prompts = await asyncio.to_thread(self._encode_prompts, body)
        wanted = Wanted(
            body.max_tokens,
            DEFAULT_COMPLETION_TOKENS,
            body.logprobs,
            body.logprobs if body.echo else None,
            await self._grammar(body.form),
        )
        jobs = [self._job(ids, body, wanted) for ids in prompts]
        renderer = CompletionRenderer(self.model_name, self.tokenizer, body.logprobs)
        echoes = await asyncio.to_thread(self._echoes, body, prompts) if body.echo else []
        return await self._answer(jobs, body, http_request, renderer, echoes)

    async def chat(self, body: ChatCompletionRequest, http_request: Request) -> Response:
        """Answer ``/v1/chat/completions``: ``n`` choices."""
        exchange_of(http_request).model = body.model
        self.check_model(body.model)
        asked = body.tools, body.tool_choice, body.parallel_tool_calls
        tools = RequestTools.of(*asked, self.tool_support, self.tokenizer)
        prompt_ids = await asyncio.to_thread(self._encode_messages, body.messages, tools=tools)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted = Wanted(
            body.max_completion_tokens or body.max_tokens,
            self.engine_loop.max_model_len,
            num_logprobs,
            grammar=await self._grammar(tools.form if tools else body.form),
        )
        job = self._job(prompt_ids, body, wanted)
        renderer = ChatRenderer(self.model_name, self.tokenizer, num_logprobs is not None, body.n or 1, tools)
        try:
            return await self._answer([job], body, http_request, renderer)
        except RequestError as error:
            raise RequestError(str(error), CHAT_PARAMS.get(error.param or "", error.param)) from error

    async def tokenize(self, body: TokenizeRequest) -> Tokenized:
        """Answer ``/tokenize``."""
        if body.model is not None:
            self.check_model(body.model)
        token_ids = await asyncio.to_thread(self._tokenize, body)
        names = [self.tokenizer.token(token_id) or "" for token_id in token_ids] if body.return_token_strs else None
        max_model_len = self.engine_loop.max_model_len
        return Tokenized(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids, token_strs=names)

    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        """Answer ``/detokenize``; special tokens are shown."""
        if body.model is not None:
            self.check_model(body.model)
        for token_id in body.tokens:
            if self.tokenizer.token(token_id) is None:
                raise RequestError(f"tokens: {token_id} is no token of model '{self.model_name}'", "tokens")
        return Detokenized(prompt=await asyncio.to_thread(self.tokenizer.decode, body.tokens, False))

    def check_model(self, name: str) -> None:
        """Raise ModelNotFoundError unless ``name`` is the served model."""
        if name != self.model_name:
            shown = shown_name(name)
            raise ModelNotFoundError(f"model '{shown}' is not served here; this server serves '{self.model_name}'")

    def _encode_prompts(self, body: CompletionRequest) -> list[list[int]]:
        encode = self.tokenizer.encode
        return [encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in body.prompts]

    def _tokenize(self, body: TokenizeRequest) -> list[int]:
        if body.messages is not None:
            return self._encode_messages(body.messages, body.add_generation_prompt is not False)
        return self.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)

    def _echoes(self, body: CompletionRequest, prompts: Sequence[Sequence[int]]) -> list[EchoedPrompt]:
        """The prompt of each choice."""
        own = [EchoedPrompt.of(self.tokenizer, *pair) for pair in zip(body.prompts, prompts, strict=True)]
        return [echo for echo in own for _ in range(body.n or 1)]

    def _encode_messages(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        tools: RequestTools | None = None,
    ) -> list[int]:
        """The template writes the special tokens itself, so that encoding must add none."""
        if self.template is None:
            raise RequestError(f"model '{self.model_name}' has no chat template; use /v1/completions", "messages")
        turns = [message.for_template() for message in messages]
        return self.tokenizer.encode(
            self.template.render(turns, add_generation_prompt, tools.for_template if tools else None)
        )

    async def _grammar(self, form: tuple[str, Grammar] | None) -> Grammar | None:
        """The grammar that a field asks for, once it is known that it can be obeyed. One at a time is compiled."""
        if form is None:
            return None
        param, grammar = form
        try:
            async with self._compiling:
                await asyncio.to_thread(self.compiler.compile, grammar)
        except RequestError as error:
            raise RequestError(f"{param}: {str(error).removeprefix('grammar: ')}", param) from error
        return grammar

    def _job(self, prompt_ids: Sequence[int], body: GenerationRequest, wanted: Wanted) -> PromptJob:
        """A limit the client did not set is cut to what fits; one it did set is the engine's to refuse."""
        max_tokens = wanted.max_tokens
        if max_tokens is None:
            max_tokens = max(1, min(wanted.default, self.engine_loop.max_model_len - len(prompt_ids)))
        return PromptJob(
            tuple(prompt_ids),
            body.sampling_params(max_tokens, wanted.num_logprobs, wanted.num_prompt_logprobs, wanted.grammar),
            body.cache_salt or "",
            body.priority or 0,
            body.qos or "standard",
            body.deadline_s,
            body.max_queue_s,
        )

    async def _answer(
        self,
        jobs: Sequence[PromptJob],
        body: GenerationRequest,
        http_request: Request,
        renderer: Renderer,
        echoes: Sequence[EchoedPrompt] = (),
    ) -> Response:
        """Run the jobs and render what comes of them, each choice after its prompt where there are ``echoes``."""
        exchange = exchange_of(http_request)
        submission = await self.engine_loop.submit(exchange.admit(jobs))
        exchange.begin(submission)
        watcher = asyncio.create_task(_end_on_disconnect(http_request, submission))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        num_choices = len(submission.samples)
        choices = [
            ChoiceText(self.tokenizer.stream(renderer.skips_special_tokens), body.stops, body.min_tokens or 0)
            for _ in range(num_choices)
        ]
        deltas = exchange.watch(self.metrics.observe(text_deltas(submission, choices), num_choices))
        if echoes:
            deltas = echoed(deltas, echoes, jobs[0].params.prompt_logprobs is not None)
        self.metrics.count_ignored(len(body.ignored))
        num_prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        if body.stream:
            if body.max_queue_ms is not None:
                deltas = await _begun(deltas)
            events = _events(deltas, renderer, num_prompt_tokens, body.include_usage)
            return StreamingResponse(events, headers=STREAM_HEADERS | body.headers, media_type="text/event-stream")
        whole = await _whole(deltas, num_choices, renderer, num_prompt_tokens)
        return Response(whole, headers=body.headers, media_type="application/json")


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
