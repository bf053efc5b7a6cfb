"""The HTTP endpoints. Each parses, makes one call and returns."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from quantpipe.errors import RequestError
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest
from quantpipe.serve.api_errors import ErrorBody, install_error_replies
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.arms.dispatch import Dispatcher
from quantpipe.serve.front_door import FrontDoor
from quantpipe.serve.front_options import FrontOptions
from quantpipe.serve.health import add_health_routes
from quantpipe.serve.keys import KeyRing
from quantpipe.serve.openapi import describe_truly
from quantpipe.serve.page import read_page
from quantpipe.serve.replies import ChatCompletion, Completion, Detokenized, Model, ModelList, Tokenized
from quantpipe.serve.serving import Serving
from quantpipe.serve.stats_models import Stats
from quantpipe.serve.stats_view import stats_view
from quantpipe.serve.tokenize_api import DetokenizeRequest, TokenizeRequest

Responses = dict[int | str, dict[str, Any]]

STREAMED: Responses = {200: {"content": {"text/event-stream": {}}}}


def errors(*statuses: int) -> Responses:
    """The description of what a route answers besides its reply."""
    return {status: {"model": ErrorBody} for status in statuses}


# What any request with a body may end with, and one that reaches the engine.
BODY_ERRORS = errors(400, 401, 404, 408, 413)
GENERATION_ERRORS = BODY_ERRORS | errors(429, 500, 503)


def create_app(
    arms: Sequence[Arm],
    model_name: str,
    on_ready: Callable[[], None] | None = None,
    options: FrontOptions | None = None,
) -> FastAPI:
    """The server's application; its lifespan starts the engines, calls ``on_ready`` and stops them at last.

    Raises ArtifactError if a model's chat template is not valid.
    """
    options = options or FrontOptions()
    serving = Serving.of(arms, model_name, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.gather(*(arm.engine.start() for arm in arms))
        if on_ready is not None:
            on_ready()
        yield
        await asyncio.gather(*(arm.engine.stop() for arm in arms))

    app = FastAPI(
        title="quantpipe", description="OpenAI-compatible API of one served model, or two.", lifespan=lifespan
    )
    install_error_replies(app)
    app.add_middleware(
        FrontDoor,
        limits=options.limits,
        queue=serving.queue,
        keys=None if options.keys is None else KeyRing(options.keys),
        are_metrics_open=options.are_metrics_open,
        metrics=serving.metrics,
    )
    _add_generation_routes(app, serving.dispatcher)
    _add_token_routes(app, serving.dispatcher)
    _add_model_routes(app, serving)
    add_health_routes(app, serving.arms, len(serving.answering))
    _add_figures_routes(app, serving)
    _add_page(app)
    describe_truly(app)
    return app


def _add_generation_routes(app: FastAPI, dispatcher: Dispatcher) -> None:
    @app.post("/v1/completions", response_model=Completion, responses=STREAMED | GENERATION_ERRORS)
    async def completions(body: CompletionRequest, http_request: Request) -> Response:
        return await dispatcher.complete(body, http_request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED | GENERATION_ERRORS)
    async def chat_completions(body: ChatCompletionRequest, http_request: Request) -> Response:
        return await dispatcher.chat(body, http_request)


def _add_token_routes(app: FastAPI, dispatcher: Dispatcher) -> None:
    @app.post("/tokenize", responses=BODY_ERRORS)
    async def tokenize(body: TokenizeRequest, http_request: Request, response: Response) -> Tokenized:
        response.headers.update(body.headers)
        return await dispatcher.service_for(body.model, http_request).tokenize(body)

    @app.post("/detokenize", responses=BODY_ERRORS)
    async def detokenize(body: DetokenizeRequest, http_request: Request, response: Response) -> Detokenized:
        response.headers.update(body.headers)
        return await dispatcher.service_for(body.model, http_request).detokenize(body)

    # Declared for clients that ask for it by habit: a page that is not there would not tell them why.
    @app.post("/v1/embeddings", status_code=400, response_model=ErrorBody, responses=errors(401, 408, 413))
    async def embeddings() -> Response:
        raise RequestError(
            f"embeddings are not served: '{dispatcher.router.model}' generates text; ask a server of an embedding model"
        )


def _add_model_routes(app: FastAPI, serving: Serving) -> None:
    created, router = int(time.time()), serving.router

    def model(name: str) -> Model:
        route = router.fixed(name, None)
        arms = serving.answering if route is None else [serving.arms[arm] for arm in route.arms]
        return Model(id=name, created=created, max_model_len=min(arm.engine.max_model_len for arm in arms))

    @app.get("/v1/models", responses=errors(401))
    async def models() -> ModelList:
        return ModelList(data=[model(name) for name in router.models])

    @app.get("/v1/models/{name:path}", responses=errors(401, 404))
    async def model_named(name: str) -> Model:
        return model(name)


def _add_figures_routes(app: FastAPI, serving: Serving) -> None:
    @app.get("/metrics", response_class=PlainTextResponse, responses=errors(401))
    async def metrics() -> Response:
        return Response(serving.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", responses=errors(401))
    async def stats() -> Stats:
        return stats_view(serving)


def _add_page(app: FastAPI) -> None:
    page = read_page()

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        return HTMLResponse(page.html, headers=page.headers)
