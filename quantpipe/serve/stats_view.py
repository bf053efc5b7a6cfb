"""The body of ``GET /stats``: what ``/metrics`` counts, for people and for the page."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from quantpipe import __version__
from quantpipe.engine.stats import EngineStats
from quantpipe.serve.arms.arm import Arm
from quantpipe.serve.health import arm_health
from quantpipe.serve.recent import RecentValues, percentiles_of
from quantpipe.serve.request_metrics import RATE_WINDOW_S, RequestMetrics
from quantpipe.serve.serving import Serving
from quantpipe.serve.shadow.metrics import ShadowMetrics
from quantpipe.serve.stats_models import (
    ArmView,
    GateView,
    KvView,
    PercentilesView,
    RequestsView,
    ServedView,
    ShadowView,
    Stats,
    TokensView,
)


def stats_view(serving: Serving) -> Stats:
    """The picture of a server now."""
    answering = serving.answering
    requests = serving.metrics.requests[: len(answering)]
    engine = _together([arm.engine.stats for arm in answering])
    return Stats(
        served=_served(serving.router.model, answering[0]),
        requests=RequestsView(
            running=engine.num_running,
            waiting=engine.num_waiting,
            open_prompts=serving.queue.num_prompts,
            open_tokens=serving.queue.num_tokens,
            preemptions=engine.num_preemptions,
            finished=dict(sum((own.finished for own in requests), Counter())),
            errors=dict(serving.metrics.errors),
        ),
        tokens=_tokens(engine, requests),
        kv=_kv(engine),
        latency=_latency(requests),
        arms=[_arm(serving, number) for number in range(len(serving.arms))] if len(serving.arms) > 1 else [],
        shadow=None if serving.shadow_metrics is None else _shadow(serving.shadow_metrics),
    )


def _arm(serving: Serving, number: int) -> ArmView:
    arm, requests = serving.arms[number], serving.metrics.requests[number]
    stats = arm.engine.stats
    return ArmView(
        label=arm.label,
        name=arm.name,
        share=serving.shares[number],
        is_shadow=number >= len(serving.answering),
        health=arm_health(arm),
        routed={} if serving.routing is None else dict(serving.routing.numbers(arm.label)),
        running=stats.num_running,
        waiting=stats.num_waiting,
        finished=dict(requests.finished),
        served=_served(arm.name, arm),
        tokens=_tokens(stats, [requests]),
        kv=_kv(stats),
        latency=_latency([requests]),
    )


def _shadow(metrics: ShadowMetrics) -> ShadowView:
    num_equal, num_different = metrics.texts["equal"], metrics.texts["different"]
    num = num_equal + num_different
    return ShadowView(
        outcomes=dict(metrics.outcomes),
        num_equal=num_equal,
        num_different=num_different,
        equal_frac=num_equal / num if num else None,
        finish_reasons=dict(metrics.reasons),
        first_difference_tokens=_percentiles([metrics.first_differences]),
        generated_tokens=dict(metrics.num_tokens),
        ttft_s={label: _percentiles([values]) for label, values in metrics.recent["ttft_s"].items()},
        tpot_s={label: _percentiles([values]) for label, values in metrics.recent["tpot_s"].items()},
    )


def _together(stats: Sequence[EngineStats]) -> EngineStats:
    """Sums; of the latest steps, which mean nothing together, too."""
    names = [field.name for field in dataclasses.fields(EngineStats)]
    return EngineStats(**{name: sum(getattr(own, name) for own in stats) for name in names})


def _tokens(engine: EngineStats, requests: Iterable[RequestMetrics]) -> TokensView:
    return TokensView(
        prompt=engine.prompt_tokens,
        generated=engine.generated_tokens,
        generated_per_s=sum(own.recent_tokens.total for own in requests) / RATE_WINDOW_S,
        prefix_hit_frac=engine.prefix_hit_frac,
        draft_acceptance_frac=engine.acceptance_frac,
    )


def _kv(engine: EngineStats) -> KvView:
    return KvView(
        usage_frac=engine.kv_usage_frac,
        held=engine.used_blocks,
        cached=engine.cached_blocks,
        free=engine.free_blocks,
    )


def _latency(requests: Sequence[RequestMetrics]) -> dict[str, PercentilesView]:
    return {name: _percentiles([own.recent[name] for own in requests]) for name in requests[0].recent}


def _served(model: str, arm: Arm) -> ServedView:
    facts = arm.read_facts()
    gate = None if facts is None else facts.gate
    return ServedView(
        model=model,
        max_model_len=arm.engine.max_model_len,
        version=__version__,
        artifact=None if facts is None else facts.artifact,
        artifact_digest=None if facts is None else facts.digest,
        backend=None if facts is None else facts.backend,
        kv_cache=None if facts is None else facts.kv_cache,
        schemes={} if facts is None else dict(facts.schemes),
        gate=None if gate is None else GateView(**{**vars(gate), "served_otherwise": list(gate.served_otherwise)}),
    )


def _percentiles(recent: Sequence[RecentValues]) -> PercentilesView:
    found = percentiles_of(*recent)
    return PercentilesView(num=found.num, p50=found.p50, p95=found.p95)
