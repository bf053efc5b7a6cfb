"""Whether the server lives, whether it takes requests, and which version it is: for supervisors, not for clients."""

from collections.abc import Callable
from typing import Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel

from quantpipe import __version__
from quantpipe.serve.engine_process.client import EngineClient
from quantpipe.serve.served_facts import ServedFacts
from quantpipe.serve.submission import RETRY_AFTER_S


class Health(BaseModel):
    """How the server and its engine fare.

    ``ok``; or requests are not taken, or wait: ``starting``, ``stalled`` (the engine has shown no progress for
    ``stalled_s`` seconds), ``failed`` for a ``reason`` (a new engine is started soon), ``stopping``. ``verdict`` is the
    gate's on the files that are served; null where none is known, or not yet.
    """

    status: Literal["ok", "starting", "stalled", "failed", "stopping"]
    reason: str | None
    stalled_s: float
    num_restarts: int
    verdict: str | None = None


class Version(BaseModel):
    """The version of quantpipe."""

    version: str


def health_of(engine: EngineClient, facts: ServedFacts | None = None) -> Health:
    """The state of a server of this engine; ``facts`` are of the folder that it serves."""
    state = engine.state
    status: Literal["ok", "starting", "stalled", "failed", "stopping"]
    status = "stopping" if engine.is_closed else "ok" if state.word == "ready" else state.word
    reason = state.reason
    if status == "stalled":
        reason = f"the engine has shown no progress for {state.still_s:.0f} s"
    gate = None if facts is None else facts.gate
    return Health(
        status=status,
        reason=reason,
        stalled_s=round(state.still_s, 1),
        num_restarts=state.num_restarts,
        verdict=None if gate is None else gate.verdict,
    )


def add_health_routes(
    app: FastAPI, engine: EngineClient, read_facts: Callable[[], ServedFacts | None] = lambda: None
) -> None:
    """``/health``, ``/ready`` and ``/version``."""

    @app.get("/health")
    async def health() -> Health:
        """Answered with 200 as long as this process lives: one that restarts its engine is not to be restarted."""
        return health_of(engine, read_facts())

    @app.get("/ready", responses={503: {"model": Health}})
    async def ready(response: Response) -> Health:
        """200 while requests are taken and worked on."""
        found = health_of(engine, read_facts())
        if found.status != "ok":
            response.status_code = 503
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return found

    @app.get("/version")
    async def version() -> Version:
        return Version(version=__version__)
