"""The HTTP endpoints. Each parses, makes one call and returns."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from quantpipe.engine.constraint import ConstraintCompiler
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.errors import RequestError
from quantpipe.guided.compiler import GrammarCompiler
from quantpipe.serve.api import ChatCompletionRequest, CompletionRequest
from quantpipe.serve.api_errors import ErrorBody, install_error_replies
from quantpipe.serve.chat import ChatTemplate
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.health import add_health_routes
from quantpipe.serve.metrics import ServerMetrics
from quantpipe.serve.openapi import describe_truly
from quantpipe.serve.replies import ChatCompletion, Completion, Detokenized, Model, ModelList, Tokenized
from quantpipe.serve.service import Service
from quantpipe.serve.tokenize_api import DetokenizeRequest, TokenizeRequest
from quantpipe.serve.tools.formats import format_of
from quantpipe.serve.tools.request_tools import ToolSupport

Responses = dict[int | str, dict[str, Any]]

STREAMED: Responses = {200: {"content": {"text/event-stream": {}}}}


def errors(*statuses: int) -> Responses:
    """The description of what a route answers besides its reply."""
    return {status: {"model": ErrorBody} for status in statuses}


# What any request that reaches the engine may end with.
GENERATION_ERRORS = errors(400, 404, 500, 503)


def create_app(
    engine_loop: EngineClient,
    tokenizer: Tokenizer,
    model_name: str,
    on_ready: Callable[[], None] | None = None,
    compiler: ConstraintCompiler | None = None,
    tool_parser: str | None = None,
) -> FastAPI:
    """The server's application; its lifespan starts ``engine_loop``, calls ``on_ready`` and stops it at last.

    Grammars are checked by ``compiler``, or by one for the tokenizer alone. Calls of tools are read as ``tool_parser``
    says, one of TOOL_FORMATS, or as the chat template shows them.
    Raises ArtifactError if the model's chat template is not valid.
    """
    template = None
    if tokenizer.chat_template is not None:
        template = ChatTemplate.compile(tokenizer.chat_template, tokenizer.special_tokens)
    source = tokenizer.chat_template or ""
    tool_support = ToolSupport(tool_parser or format_of(source), template is not None and template.knows_tools)
    metrics = ServerMetrics(lambda: engine_loop.stats)
    service = Service(
        engine_loop, tokenizer, model_name, template, metrics, compiler or GrammarCompiler(tokenizer), tool_support
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
    _add_generation_routes(app, service)
    _add_token_routes(app, service)
    _add_model_routes(app, service)
    _add_operations_routes(app, service)
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
    @app.post("/tokenize", responses=errors(400, 404))
    async def tokenize(body: TokenizeRequest, response: Response) -> Tokenized:
        response.headers.update(body.headers)
        return await service.tokenize(body)

    @app.post("/detokenize", responses=errors(400, 404))
    async def detokenize(body: DetokenizeRequest, response: Response) -> Detokenized:
        response.headers.update(body.headers)
        return await service.detokenize(body)

    # Declared for clients that ask for it by habit: a page that is not there would not tell them why.
    @app.post("/v1/embeddings", status_code=400, response_model=ErrorBody)
    async def embeddings() -> Response:
        raise RequestError(
            f"embeddings are not served: '{service.model_name}' generates text; ask a server of an embedding model"
        )


def _add_model_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    def model() -> Model:
        return Model(id=service.model_name, created=created, max_model_len=service.engine_loop.max_model_len)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[model()])

    @app.get("/v1/models/{name:path}", responses=errors(404))
    async def model_named(name: str) -> Model:
        service.check_model(name)
        return model()


def _add_operations_routes(app: FastAPI, service: Service) -> None:
    add_health_routes(app, service.engine_loop)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
