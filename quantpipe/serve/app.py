"""The HTTP endpoints. Each parses, makes one call and returns."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest
from quantpipe.serve.api_errors import ErrorBody, install_error_replies
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.health import add_health_routes
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.replies import ChatCompletion, Completion, Model, ModelList
from quantpipe.serve.service import Service

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def create_app(
    engine_loop: EngineClient, tokenizer: Tokenizer, model_name: str, on_ready: Callable[[], None] | None = None
) -> FastAPI:
    """The server's application; its lifespan starts ``engine_loop``, calls ``on_ready`` and stops it at last.

    Raises ArtifactError if the model's chat template is not valid.
    """
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate.compile(tokenizer.chat_template, tokenizer.special_tokens)
    metrics = ServerMetrics(lambda: engine_loop.stats)
    service = Service(engine_loop, tokenizer, model_name, template, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine_loop.start()
        if on_ready is not None:
            on_ready()
        yield
        await engine_loop.stop()

    app = FastAPI(title="quantpipe", description="OpenAI-compatible API of one served model.", lifespan=lifespan)
    install_error_replies(app)
    _add_generation_routes(app, service)
    _add_model_routes(app, service)
    _add_operations_routes(app, service)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=Completion, responses=STREAMED | ERRORS)
    async def completions(body: CompletionRequest, http_request: Request) -> Response:
        return await service.complete(body, http_request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED | ERRORS)
    async def chat_completions(body: ChatCompletionRequest, http_request: Request) -> Response:
        return await service.chat(body, http_request)


def _add_model_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def model() -> Model:
        return Model(id=service.model_name, created=created, max_model_len=service.engine_loop.max_model_len)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[model()])

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model_named(name: str) -> Model:
        service.check_model(name)
        return model()


def _add_operations_routes(app: FastAPI, service: Service) -> None:
    add_health_routes(app, service.engine_loop)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
