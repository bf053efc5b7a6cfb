"""What the server counts, in Prometheus form. Names after ``quantpipe:`` are those that vLLM uses."""

import time
from collections.abc import AsyncIterator, Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quantpipe.engine.stats import EngineStats
from quantpipe.serve.generation import TextDelta

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
LATENCY_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class EngineCollector:
    """Reads the engine's own counters whenever metrics are asked for."""

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client wants them."""
        stats = self._read_stats()
        yield from _gauges(stats)
        yield from _counters(stats)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    gauge = GaugeMetricFamily
    yield gauge("quantpipe:num_requests_running", "Samples in the batch", stats.num_running)
    yield gauge("quantpipe:num_requests_waiting", "Samples in the queue", stats.num_waiting)
    yield gauge("quantpipe:kv_cache_usage_perc", "Fraction of KV blocks in use (1 = all)", stats.kv_usage_frac)
    blocks = gauge("quantpipe:kv_blocks", "KV blocks: held by samples, cached for prefixes, free", labels=["state"])
    for state, num in (("held", stats.used_blocks), ("cached", stats.cached_blocks), ("free", stats.free_blocks)):
        blocks.add_metric([state], num)
    yield blocks
    yield gauge("quantpipe:last_step_tokens", "Tokens of the latest engine step", stats.last_step_tokens)
    yield gauge("quantpipe:last_step_seconds", "Time of the latest engine step", stats.last_step_s)


def _counters(stats: EngineStats) -> Iterator[Metric]:
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
    ):
        yield CounterMetricFamily(f"quantpipe:{name}", text, value)


class ServerMetrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self, read_stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(read_stats))
        histogram = self._histogram
        self._ttft = histogram("time_to_first_token", "Request accepted to first text", TTFT_BUCKETS_S)
        self._tpot = histogram("request_time_per_output_token", "Per choice, after the first text", TPOT_BUCKETS_S)
        self._latency = histogram("e2e_request_latency", "Request accepted to last text, per choice", LATENCY_BUCKETS_S)
        self._finished = Counter(
            "quantpipe:request_success", "Choices that ended", ["finished_reason"], registry=self._registry
        )
        self._ignored = Counter("quantpipe:ignored_fields", "Fields that mean nothing here", registry=self._registry)

    def _histogram(self, stem: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(f"quantpipe:{stem}_seconds", text, buckets=buckets_s, registry=self._registry)

    def count_ignored(self, num_fields: int) -> None:
        """A request had so many fields that were ignored."""
        self._ignored.inc(num_fields)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return bytes(generate_latest(self._registry))

    async def observe(self, deltas: AsyncIterator[tuple[int, TextDelta]]) -> AsyncIterator[tuple[int, TextDelta]]:
        """Pass the deltas of one request on, and time them from now."""
        started_s = time.monotonic()
        first_s: dict[int, float] = {}
        async for index, delta in deltas:
            now_s = time.monotonic()
            if index not in first_s:
                first_s[index] = now_s
                self._ttft.observe(now_s - started_s)
            if delta.finish_reason is not None:
                self._finished.labels(delta.finish_reason).inc()
                self._latency.observe(now_s - started_s)
                if delta.num_tokens > 1:
                    self._tpot.observe((now_s - first_s[index]) / (delta.num_tokens - 1))
            yield index, delta
