"""What engines count, in Prometheus form: read from them whenever metrics are asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quantpipe.engine.stats import EngineStats

Value: TypeAlias = tuple[str, str, float, Mapping[str, str]]  # name, what it is, value, labels


@dataclass(frozen=True)
class EngineReader:
    """What an engine counts, of itself (``stats``) and what is counted of it. ``arm`` None: there is one engine."""

    arm: str | None
    stats: Callable[[], EngineStats]
    num_restarts: Callable[[], int]


class EngineCollector:
    """Reads the engines' own counters whenever metrics are asked for. Only where there are several, a label tells."""

    def __init__(self, engines: Sequence[EngineReader]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client wants them."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for engine in self._engines:
            own_labels = {} if engine.arm is None else {"arm": engine.arm}
            stats = engine.stats()
            for make, values in ((GaugeMetricFamily, _gauges(stats)), (CounterMetricFamily, _counters(stats, engine))):
                for name, text, value, more in values:
                    labels = {**own_labels, **more}
                    if name not in families:
                        families[name] = make(f"quantpipe:{name}", text, labels=list(labels))
                    families[name].add_metric(list(labels.values()), value)
        yield from families.values()


def _gauges(stats: EngineStats) -> Iterator[Value]:
    yield "num_requests_running", "Samples in the batch", stats.num_running, {}
    yield "num_requests_waiting", "Samples in the queue", stats.num_waiting, {}
    yield "kv_cache_usage_perc", "Fraction of KV blocks in use (1 = all)", stats.kv_usage_frac, {}
    for state, num in (("held", stats.used_blocks), ("cached", stats.cached_blocks), ("free", stats.free_blocks)):
        yield "kv_blocks", "KV blocks: held by samples, cached for prefixes, free", num, {"state": state}
    yield "last_step_tokens", "Tokens of the latest engine step", stats.last_step_tokens, {}
    yield "last_step_seconds", "Time of the latest engine step", stats.last_step_s, {}


def _counters(stats: EngineStats, engine: EngineReader) -> Iterator[Value]:
    for name, text, value in (
        ("num_preemptions", "Samples set back to the queue", stats.num_preemptions),
        ("prompt_tokens", "Prompt tokens computed or found", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.generated_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_query_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hit_tokens),
        ("prefix_cache_evictions", "Cached blocks whose space was needed", stats.prefix_evictions),
        ("kv_blocks_copied", "KV blocks copied where samples of one prompt parted", stats.copied_blocks),
        ("engine_steps", "Engine steps", stats.steps),
        ("engine_step_tokens", "Tokens of all engine steps", stats.step_tokens),
        ("engine_step_seconds", "Time of all engine steps", stats.step_s),
        ("attention_context_tokens", "Context tokens that attention wanted", stats.context_tokens),
        ("attention_padded_tokens", "Context tokens that attention read, with padding", stats.padded_context_tokens),
        ("spec_decode_num_draft_tokens", "Tokens guessed", stats.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Guessed tokens that proved right", stats.accepted_tokens),
        ("nonfinite_failures", "Samples given up as the model's logits were no numbers", stats.nonfinite_failures),
        ("engine_restarts", "Engines started in place of one that was lost", engine.num_restarts()),
    ):
        yield name, text, value, {}
