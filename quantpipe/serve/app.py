"""The HTTP endpoints. Each parses, makes one call and returns."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.guided.compiler import GrammarCompiler
from quantpipe.serve.admission.queue import AdmissionQueue
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest
from quantpipe.serve.api_errors import ErrorBody, install_error_replies
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.front_door import FrontDoor
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.health import add_health_routes
from quantpipe.serve.keys import KeyRing
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.openapi import describe_truly
from quantpipe.serve.page import read_page
from quantpipe.serve.replies import ChatCompletion, Completion, Detokenized, Model, ModelList, Tokenized
from quantpipe.serve.served_facts import ServedFacts
from quantpipe.serve.service import Service
from quantpipe.serve.stats_view import Stats, stats_view
from quantpipe.serve.tokenize_api import DetokenizeRequest, TokenizeRequest
from quantpipe.serve.tools.formats import format_of
from quantpipe.serve.tools.request_tools import ToolSupport

Responses = dict[int | str, dict[str, Any]]

STREAMED: Responses = {200: {"content": {"text/event-stream": {}}}}


def errors(*statuses: int) -> Responses:
    """The description of what a route answers besides its reply."""
    return {status: {"model": ErrorBody} for status in statuses}


# What any request with a body may end with, and one that reaches the engine.
BODY_ERRORS = errors(400, 401, 404, 408, 413)
GENERATION_ERRORS = BODY_ERRORS | errors(429, 500, 503)


def create_app(
    engine_loop: EngineClient,
    tokenizer: Tokenizer,
    model_name: str,
    on_ready: Callable[[], None] | None = None,
    options: FrontOptions | None = None,
    read_facts: Callable[[], ServedFacts | None] = lambda: None,
) -> FastAPI:
    """The server's application; its lifespan starts ``engine_loop``, calls ``on_ready`` and stops it at last.

    ``read_facts`` gives what is known by now of the folder that is served, to be shown. Raises ArtifactError if the
    model's chat template is not valid.
    """
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate.compile(tokenizer.chat_template, tokenizer.special_tokens)
    options = options or FrontOptions()
    tool_parser = options.tool_parser or format_of(tokenizer.chat_template or "")
    queue = AdmissionQueue(options.limits)
    metrics = ServerMetrics(lambda: engine_loop.stats, lambda: (queue.num_prompts, queue.num_tokens))
    service = Service(
        engine_loop,
        tokenizer,
        model_name,
        template,
        metrics,
        GrammarCompiler(tokenizer),
        ToolSupport(tool_parser, template is not None and template.knows_tools),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine_loop.start()
        if on_ready is not None:
            on_ready()
        yield
        await engine_loop.stop()

    app = FastAPI(title="quantpipe", description="OpenAI-compatible API of one served model.", lifespan=lifespan)
    install_error_replies(app)
    app.add_middleware(
        FrontDoor,
        limits=options.limits,
        queue=queue,
        keys=None if options.keys is None else KeyRing(options.keys),
        are_metrics_open=options.are_metrics_open,
        metrics=metrics,
    )
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    _add_model_routes(app, service)
    _add_operations_routes(app, service, read_facts)
    _add_stats_route(app, service, queue, read_facts)
    _add_page(app)
    describe_truly(app)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion, responses=STREAMED | GENERATION_ERRORS)
    async def completions(body: CompletionRequest, http_request: Request) -> Response:
        return await service.complete(body, http_request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED | GENERATION_ERRORS)
    async def chat_completions(body: ChatCompletionRequest, http_request: Request) -> Response:
        return await service.chat(body, http_request)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=BODY_ERRORS)
    async def tokenize(body: TokenizeRequest, response: Response) -> Tokenized:
        response.headers.update(body.headers)
        return await service.tokenize(body)

    @app.post("/detokenize", responses=BODY_ERRORS)
    async def detokenize(body: DetokenizeRequest, response: Response) -> Detokenized:
        response.headers.update(body.headers)
        return await service.detokenize(body)

    # Declared for clients that ask for it by habit: a page that is not there would not tell them why.
    @app.post("/v1/embeddings", status_code=400, response_model=ErrorBody, responses=errors(401, 408, 413))
    async def embeddings() -> Response:
        raise RequestError(
            f"embeddings are not served: '{service.model_name}' generates text; ask a server of an embedding model"
        )


def _add_model_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def model() -> Model:
        return Model(id=service.model_name, created=created, max_model_len=service.engine_loop.max_model_len)

    @app.get("/v1/models", responses=errors(401))
    async def models() -> ModelList:
        return ModelList(data=[model()])

    @app.get("/v1/models/{name:path}", responses=errors(401, 404))
    async def model_named(name: str) -> Model:
        service.check_model(name)
        return model()


def _add_operations_routes(app: FastAPI, service: Service, read_facts: Callable[[], ServedFacts | None]) -> None:
    add_health_routes(app, service.engine_loop, read_facts)

    @app.get("/metrics", response_class=PlainTextResponse, responses=errors(401))
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_stats_route(
    app: FastAPI, service: Service, queue: AdmissionQueue, read_facts: Callable[[], ServedFacts | None]
) -> None:
    @app.get("/stats", responses=errors(401))
    async def stats() -> Stats:
        loop = service.engine_loop
        return stats_view(service.model_name, loop.max_model_len, read_facts(), loop.stats, queue, service.metrics)


def _add_page(app: FastAPI) -> None:
    page = read_page()

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(page.html, headers=page.headers)
