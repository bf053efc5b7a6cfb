"""Whether the server lives, whether it takes requests, and which version it is: for supervisors, not for clients."""

from collections.abc import Sequence
from typing import Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel

from quantpipe import __version__
from quantpipe.serve.arms.arm import Arm

Word = Literal["ok", "degraded", "starting", "stalled", "failed", "stopping"]


class ArmHealth(BaseModel):
    """How one engine fares. See ``Health``."""

    status: Word
    reason: str | None
    stalled_s: float
    num_restarts: int
    verdict: str | None = None


class Health(ArmHealth):
    """How the server and its engines fare.

    ``ok``; or requests are not taken, or wait: ``starting``, ``stalled`` (the engine has shown no progress for
    ``stalled_s`` seconds), ``failed`` for a ``reason`` (a new engine is started soon), ``stopping``. ``degraded``: one
    of two arms is not ok, and the other takes its requests; a shadow that is not ok is degraded, too. Restarts are
    those of all ``arms``, which are by label, and empty where there is one.
    """

    arms: dict[str, ArmHealth] = {}


class Version(BaseModel):
    """The version of quantpipe."""

    version: str


def health_of(arms: Sequence[Arm], num_answering: int) -> Health:
    """The state of a server of these arms, of which the first ``num_answering`` answer."""
    own = {arm.label: arm_health(arm) for arm in arms}
    answering = list(own.values())[:num_answering]
    best = next((one for one in answering if one.status == "ok"), answering[0])
    status, reason = best.status, best.reason
    troubled = [f"arm {label}: {one.reason or one.status}" for label, one in own.items() if one.status != "ok"]
    if status == "ok" and troubled:
        status, reason = "degraded", "; ".join(troubled)
    return Health(
        status=status,
        reason=reason,
        stalled_s=max(one.stalled_s for one in own.values()),
        num_restarts=sum(one.num_restarts for one in own.values()),
        verdict=answering[0].verdict,
        arms=own if len(arms) > 1 else {},
    )


def arm_health(arm: Arm) -> ArmHealth:
    """The state of one engine, and the verdict on what it serves."""
    engine, facts = arm.engine, arm.read_facts()
    state = engine.state
    status: Word = "stopping" if engine.is_closed else "ok" if state.word == "ready" else state.word
    reason = state.reason
    if status == "stalled":
        reason = f"the engine has shown no progress for {state.still_s:.0f} s"
    gate = None if facts is None else facts.gate
    return ArmHealth(
        status=status,
        reason=reason,
        stalled_s=round(state.still_s, 1),
        num_restarts=state.num_restarts,
        verdict=None if gate is None else gate.verdict,
    )


def add_health_routes(app: FastAPI, arms: Sequence[Arm], num_answering: int) -> None:
    """``/health``, ``/ready`` and ``/version``."""

    @app.get("/health")
    async def health() -> Health:
        """Answered with 200 as long as this process lives: one that restarts its engine is not to be restarted."""
        return health_of(arms, num_answering)

    @app.get("/ready", responses={503: {"model": Health}})
    async def ready(response: Response) -> Health:
        """200 while requests are taken and worked on."""
        found = health_of(arms, num_answering)
        if found.status not in ("ok", "degraded"):
            response.status_code = 503
            soonest_s = min(arm.engine.state.retry_after_s for arm in arms[:num_answering])
            response.headers["Retry-After"] = str(soonest_s)
        return found

    @app.get("/version")
    async def version() -> Version:
        return Version(version=__version__)
