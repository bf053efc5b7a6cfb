"""The shape of the body of ``GET /stats``. Seconds, tokens, shares."""

from pydantic import BaseModel

from quantpipe.serve.health import ArmHealth


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


class ArmView(BaseModel):
    """One of two arms: its ``share`` of the requests that ask for none, and ``routed``, those it took, by reason."""

    label: str
    name: str
    share: float
    is_shadow: bool
    health: ArmHealth
    routed: dict[str, int]
    running: int
    waiting: int
    finished: dict[str, int]
    served: ServedView
    tokens: TokensView
    kv: KvView
    latency: dict[str, PercentilesView]


class ShadowView(BaseModel):
    """What came of following requests: numbers of requests by ``outcomes``, of choices with equal and different texts,
    and by ``finish_reasons`` of the two (``stop/length``). Tokens, and percentiles of the last minute, by arm.
    """

    outcomes: dict[str, int]
    num_equal: int
    num_different: int
    equal_frac: float | None
    finish_reasons: dict[str, int]
    first_difference_tokens: PercentilesView
    generated_tokens: dict[str, int]
    ttft_s: dict[str, PercentilesView]
    tpot_s: dict[str, PercentilesView]


class Stats(BaseModel):
    """The picture of a server now. Of two arms that answer: together, but ``served`` of the first."""

    served: ServedView
    requests: RequestsView
    tokens: TokensView
    kv: KvView
    latency: dict[str, PercentilesView]
    arms: list[ArmView] = []
    shadow: ShadowView | None = None
