"""The HTTP endpoints. Each parses, makes one call and returns."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.admission.queue import AdmissionQueue
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest
from quantpipe.serve.api_errors import ErrorBody, install_error_replies
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.front_door import FrontDoor
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.keys import KeyRing
from quantpipe.serve.loop import EngineLoop
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.page import read_page
from quantpipe.serve.replies import ChatCompletion, Completion, Health, Model, ModelList
from quantpipe.serve.served_facts import ServedFacts
from quantpipe.serve.service import Service
from quantpipe.serve.stats_view import Stats, stats_view

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def create_app(
    engine_loop: EngineLoop,
    tokenizer: Tokenizer,
    model_name: str,
    on_ready: Callable[[], None] | None = None,
    options: FrontOptions | None = None,
    read_facts: Callable[[], ServedFacts | None] = lambda: None,
) -> FastAPI:
    """The server's application; its lifespan starts and stops ``engine_loop`` and calls ``on_ready`` in between.

    ``read_facts`` gives what is known by now of the folder that is served, to be shown. Raises ArtifactError if the
    model's chat template is not valid.
    """
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate.compile(tokenizer.chat_template, tokenizer.special_tokens)
    options = options or FrontOptions()
    queue = AdmissionQueue(options.limits)
    metrics = ServerMetrics(lambda: engine_loop.stats, lambda: (queue.num_prompts, queue.num_tokens))
    service = Service(engine_loop, tokenizer, model_name, template, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine_loop.start()
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
    _add_model_routes(app, service)
    _add_operations_routes(app, service)
    _add_stats_route(app, service, queue, read_facts)
    _add_page(app)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion, responses=STREAMED | ERRORS)
    async def completions(body: CompletionRequest, http_request: Request) -> Response:
        return await service.complete(body, http_request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED | ERRORS)
    async def chat_completions(body: ChatCompletionRequest, http_request: Request) -> Response:
        return await service.chat(body, http_request)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    model = Model(id=service.model_name, created=int(time.time()), max_model_len=service.engine_loop.max_model_len)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[model])

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model_named(name: str) -> Model:
        service.check_model(name)
        return model


def _add_operations_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        loop = service.engine_loop
        if loop.failure is not None:
            response.status_code = 503
            return Health(status="failed", reason=loop.failure)
        if loop.is_closed:
            response.status_code = 503
            return Health(status="stopping")
        return Health(status="ok")

    @app.get("/metrics", responses=ERRORS)
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _add_stats_route(
    app: FastAPI, service: Service, queue: AdmissionQueue, read_facts: Callable[[], ServedFacts | None]
) -> None:
    @app.get("/stats", responses=ERRORS)
    async def stats() -> Stats:
        loop = service.engine_loop
        return stats_view(service.model_name, loop.max_model_len, read_facts(), loop.stats, queue, service.metrics)


def _add_page(app: FastAPI) -> None:
    page = read_page()

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(page.html, headers=page.headers)
