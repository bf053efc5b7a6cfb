"""One request to one model, from its parsed body to its response: encode, submit, watch the client, render."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from quantpipe.engine.constraint import ConstraintCompiler, Grammar
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest, GenerationRequest
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.echo import EchoedPrompt, echoed
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.exchange import exchange_of
from quantpipe.serve.generation import ChoiceText, text_deltas
from quantpipe.serve.prompt_encoder import PromptEncoder
from quantpipe.serve.render import ChatRenderer, CompletionRenderer, Renderer
from quantpipe.serve.replies import Detokenized, Tokenized
from quantpipe.serve.request_metrics import RequestMetrics
from quantpipe.serve.response_body import Deltas, begun, events, whole
from quantpipe.serve.submission import AbortedError, PromptJob, Submission
from quantpipe.serve.tokenize_api import DetokenizeRequest, TokenizeRequest
from quantpipe.serve.tools.request_tools import RequestTools, ToolSupport

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; chat completions may use what is left of the context
CHAT_PARAMS = {"prompt": "messages", "logprobs": "top_logprobs"}  # the engine's words -> the client's
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Wanted(NamedTuple):
    """What the endpoints word differently: the most new tokens (or a default), log-probabilities, and a grammar."""

    max_tokens: int | None
    default: int
    num_logprobs: int | None
    num_prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class Follower(Protocol):
    """Who answers the same request elsewhere, to compare."""

    def follow(
        self, submission: Submission, choices: Sequence[ChoiceText], skips_special_tokens: bool, deltas: Deltas
    ) -> Deltas:
        """The deltas, as they are. Called once ``submission`` was accepted; ``choices`` are what they are made by."""
        ...


@dataclass(frozen=True)
class Handling:
    """How a request is answered besides what it says: whether it is begun before its response is, so that it may yet
    go to another arm, and who follows it.
    """

    is_begun_first: bool = False
    follower: Follower | None = None


PLAIN = Handling()


@dataclass(frozen=True)
class Service:
    """What all requests to one model share. ``model_name`` is what errors call it."""

    engine_loop: EngineClient
    tokenizer: Tokenizer
    model_name: str
    template: ChatTemplate | None
    metrics: RequestMetrics
    compiler: ConstraintCompiler
    tool_support: ToolSupport
    _compiling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _watchers: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def encoder(self) -> PromptEncoder:
        """What turns prompts into tokens."""
        return PromptEncoder(self.tokenizer, self.template, self.model_name)

    def tools_of(self, body: ChatCompletionRequest) -> RequestTools | None:
        """What the answer may call."""
        return RequestTools.of(
            body.tools, body.tool_choice, body.parallel_tool_calls, self.tool_support, self.tokenizer
        )

    async def complete(self, body: CompletionRequest, http_request: Request, handling: Handling = PLAIN) -> Response:
        """Answer ``/v1/completions``: ``n`` choices per prompt."""
        prompts = await asyncio.to_thread(self.encoder.prompts, body)
        wanted = Wanted(
            body.max_tokens,
            DEFAULT_COMPLETION_TOKENS,
            body.logprobs,
            body.logprobs if body.echo else None,
            await self._grammar(body.form),
        )
        jobs = [self._job(ids, body, wanted) for ids in prompts]
        renderer = CompletionRenderer(body.model, self.tokenizer, body.logprobs)
        echoes = await asyncio.to_thread(self.encoder.echoes, body, prompts) if body.echo else []
        return await self._answer(jobs, body, http_request, renderer, handling, echoes)

    async def chat(self, body: ChatCompletionRequest, http_request: Request, handling: Handling = PLAIN) -> Response:
        """Answer ``/v1/chat/completions``: ``n`` choices."""
        tools = self.tools_of(body)
        prompt_ids = await asyncio.to_thread(self.encoder.messages, body.messages, tools=tools)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted = Wanted(
            body.max_completion_tokens or body.max_tokens,
            self.engine_loop.max_model_len,
            num_logprobs,
            grammar=await self._grammar(tools.form if tools else body.form),
        )
        job = self._job(prompt_ids, body, wanted)
        renderer = ChatRenderer(body.model, self.tokenizer, num_logprobs is not None, body.n or 1, tools)
        try:
            return await self._answer([job], body, http_request, renderer, handling)
        except RequestError as error:
            raise RequestError(str(error), CHAT_PARAMS.get(error.param or "", error.param)) from error

    async def tokenize(self, body: TokenizeRequest) -> Tokenized:
        """Answer ``/tokenize``."""
        token_ids = await asyncio.to_thread(self.encoder.tokenize, body)
        names = [self.tokenizer.token(token_id) or "" for token_id in token_ids] if body.return_token_strs else None
        max_model_len = self.engine_loop.max_model_len
        return Tokenized(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids, token_strs=names)

    async def detokenize(self, body: DetokenizeRequest) -> Detokenized:
        """Answer ``/detokenize``; special tokens are shown."""
        for token_id in body.tokens:
            if self.tokenizer.token(token_id) is None:
                raise RequestError(f"tokens: {token_id} is no token of model '{self.model_name}'", "tokens")
        return Detokenized(prompt=await asyncio.to_thread(self.tokenizer.decode, body.tokens, False))

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
        handling: Handling,
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
        deltas = exchange.watch(
            self.metrics.observe(text_deltas(submission, choices), num_choices, submission.submitted_s)
        )
        if handling.follower is not None:
            deltas = handling.follower.follow(submission, choices, renderer.skips_special_tokens, deltas)
        if echoes:
            deltas = echoed(deltas, echoes, jobs[0].params.prompt_logprobs is not None)
        num_prompt_tokens = sum(len(job.prompt_ids) for job in jobs)
        if body.stream:
            if handling.is_begun_first or body.max_queue_ms is not None:
                deltas = await begun(deltas)
            stream = events(deltas, renderer, num_prompt_tokens, body.include_usage)
            return StreamingResponse(stream, headers=STREAM_HEADERS | body.headers, media_type="text/event-stream")
        content = await whole(deltas, num_choices, renderer, num_prompt_tokens)
        return Response(content, headers=body.headers, media_type="application/json")


async def _end_on_disconnect(http_request: Request, submission: Submission) -> None:
    """Wait until the client is gone (the server says so after the response, too) and end what is left."""
    while (await http_request.receive())["type"] != "http.disconnect":
        pass
    submission.end(AbortedError("the client closed the connection"))
