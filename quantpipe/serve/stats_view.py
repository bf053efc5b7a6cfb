"""The body of ``GET /stats``: what ``/metrics`` counts, for people and for the page. Seconds, tokens, shares."""

from pydantic import BaseModel

from quantpipe import __version__
from quantpipe.engine.stats import EngineStats
from quantpipe.serve.admission.queue import AdmissionQueue
from quantpipe.serve.metrics import RATE_WINDOW_S, ServerMetrics
from quantpipe.serve.recent import RecentValues
from quantpipe.serve.served_facts import ServedFacts


class GateView(BaseModel):
    """The verdict on what is served; ``served_otherwise`` are engine settings that it was not judged with."""

    verdict: str
    recipe: str
    recipe_digest: str
    date: str
    served_otherwise: list[str]


class ServedView(BaseModel):
    """What is served; ``schemes`` are numbers of layers."""

    model: str
    max_model_len: int
    version: str
    artifact: str | None
    artifact_digest: str | None
    backend: str | None
    kv_cache: str | None
    schemes: dict[str, int]
    gate: GateView | None


class RequestsView(BaseModel):
    """Requests now (``running`` and ``waiting`` in the engine, ``open_prompts`` with those that are being sent), and
    since the start."""

    running: int
    waiting: int
    open_prompts: int
    open_tokens: int
    preemptions: int
    finished: dict[str, int]
    errors: dict[str, int]


class TokensView(BaseModel):
    """Tokens since the start, and of the latest seconds the rate of those that were sent."""

    prompt: int
    generated: int
    generated_per_s: float
    prefix_hit_frac: float
    draft_acceptance_frac: float


class KvView(BaseModel):
    """KV blocks: the share that is held, and how many in each state."""

    usage_frac: float
    held: int
    cached: int
    free: int


class PercentilesView(BaseModel):
    """Of the values of the last minute; null where there were none."""

    num: int
    p50: float | None
    p95: float | None


class Stats(BaseModel):
    """The picture of a server now."""

    served: ServedView
    requests: RequestsView
    tokens: TokensView
    kv: KvView
    latency: dict[str, PercentilesView]


def stats_view(
    model: str,
    max_model_len: int,
    facts: ServedFacts | None,
    engine: EngineStats,
    queue: AdmissionQueue,
    metrics: ServerMetrics,
) -> Stats:
    """The picture of a server now."""
    return Stats(
        served=_served(model, max_model_len, facts),
        requests=RequestsView(
            running=engine.num_running,
            waiting=engine.num_waiting,
            open_prompts=queue.num_prompts,
            open_tokens=queue.num_tokens,
            preemptions=engine.num_preemptions,
            finished=dict(metrics.finished),
            errors=dict(metrics.errors),
        ),
        tokens=TokensView(
            prompt=engine.prompt_tokens,
            generated=engine.generated_tokens,
            generated_per_s=metrics.recent_tokens.total / RATE_WINDOW_S,
            prefix_hit_frac=engine.prefix_hit_frac,
            draft_acceptance_frac=engine.acceptance_frac,
        ),
        kv=KvView(
            usage_frac=engine.kv_usage_frac,
            held=engine.used_blocks,
            cached=engine.cached_blocks,
            free=engine.free_blocks,
        ),
        latency={name: _percentiles(values) for name, values in metrics.recent.items()},
    )


def _served(model: str, max_model_len: int, facts: ServedFacts | None) -> ServedView:
    gate = None if facts is None else facts.gate
    return ServedView(
        model=model,
        max_model_len=max_model_len,
        version=__version__,
        artifact=None if facts is None else facts.artifact,
        artifact_digest=None if facts is None else facts.digest,
        backend=None if facts is None else facts.backend,
        kv_cache=None if facts is None else facts.kv_cache,
        schemes={} if facts is None else dict(facts.schemes),
        gate=None if gate is None else GateView(**{**vars(gate), "served_otherwise": list(gate.served_otherwise)}),
    )


def _percentiles(values: RecentValues) -> PercentilesView:
    found = values.percentiles()
    return PercentilesView(num=found.num, p50=found.p50, p95=found.p95)
