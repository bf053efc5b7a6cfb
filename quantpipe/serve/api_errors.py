"""Every failure as the one error body clients know: ``{"error": {"message", "type", "param", "code"}}``."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from quantpipe.errors import RequestError
from quantpipe.serve.admission.limits import RefusedError, SlowClientError
from quantpipe.serve.submission import AbortedError, EngineFailedError, UnavailableError

PROBLEM_KEY = "problem"  # in the state of a request that was answered with one
STATUS_CLIENT_CLOSED = 499  # nobody reads it; it shows in logs and metrics


class ErrorDetail(BaseModel):
    """What went wrong; ``param`` is the offending field, ``code`` a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every response with a status of 400 or above."""

    error: ErrorDetail


@dataclass(frozen=True)
class Problem:
    """An error body and the status it is sent with."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def kind(self) -> str:
        """OpenAI's word for it."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def counted_as(self) -> str:
        """What it is called in metrics and logs: one of a few words."""
        return self.code or ("invalid_request" if self.status < 500 else "internal_error")

    def body(self) -> bytes:
        """The JSON body; whatever the message quotes, it can be encoded."""
        detail = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": detail}, ensure_ascii=False).encode("utf-8", "backslashreplace")

    def response(self) -> Response:
        """The whole response."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status == 408:
            headers["Connection"] = "close"  # the rest of the body may come at any time
        return Response(self.body(), self.status, headers, "application/json")


class ModelNotFoundError(Exception):
    """A request names a model that is not the one served."""


def problem_of(error: Exception) -> Problem:
    """The problem a client is told about for ``error``."""
    match error:
        case RequestError():
            return Problem(400, str(error), error.param)
        case RequestValidationError():
            return _validation_problem(error.errors())
        case ModelNotFoundError():
            return Problem(404, str(error), "model", "model_not_found")
        case HTTPException():
            return Problem(error.status_code, error.detail)
        case UnavailableError():
            return Problem(503, str(error), code=error.code, retry_after_s=error.retry_after_s)
        case RefusedError():
            return Problem(error.status, str(error), code=error.code, retry_after_s=error.retry_after_s)
        case SlowClientError():
            return Problem(408, str(error), code="slow_client")
        case EngineFailedError():
            return Problem(500, str(error), code="engine_failed")
        case AbortedError():
            return Problem(STATUS_CLIENT_CLOSED, str(error), code="client_closed")
        case _:
            return Problem(500, f"internal error ({type(error).__name__})", code="internal_error")


def install_error_replies(app: FastAPI) -> None:
    """Have ``app`` answer every exception with its problem."""

    async def reply(request: Request, error: Exception) -> Response:
        problem = problem_of(error)
        setattr(request.state, PROBLEM_KEY, problem)
        return problem.response()

    known = (RequestError, RequestValidationError, ModelNotFoundError, HTTPException)
    for kind in (*known, UnavailableError, EngineFailedError, AbortedError, SlowClientError):
        app.add_exception_handler(kind, reply)


def _validation_problem(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """The most deeply nested error: of a union's alternatives, the one the value came nearest to."""
    error = max(errors, key=lambda found: len(found["loc"]))
    if error["type"] == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {error['ctx']['error']} at character {error['loc'][-1]}")
    param = error.get("ctx", {}).get("param") or _dotted(error["loc"])
    if not param:
        return Problem(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if "param" in error.get("ctx", {}):
        return Problem(400, error["msg"], param, error["type"])
    found = "" if error["type"] == "missing" else f" (found {reprlib.repr(error['input'])})"
    message = error["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return Problem(400, f"{param}: {message}{found}", param)


def _dotted(location: Sequence[str | int]) -> str:
    """``messages.0.content`` of a location, without the names of a union's alternatives."""
    parts = [part for part in location[1:] if isinstance(part, int) or part.isidentifier()]
    return ".".join(str(part) for part in parts if part not in ("str", "int"))
