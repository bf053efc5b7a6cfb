"""What the server counts, in Prometheus form. Names after ``quantpipe:`` are those that vLLM uses."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quantpipe.engine.stats import EngineStats
from quantpipe.serve.admission.sliding_sum import SlidingSum
from quantpipe.serve.exchange import Exchange
from quantpipe.serve.generation import TextDelta
from quantpipe.serve.recent import RecentValues

# Limits of the histograms' buckets, in seconds and in tokens.
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
LATENCY_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
RATE_WINDOW_S = 10


@dataclass
class ChoiceTimes:
    """When a choice had its first and its latest text, and how many tokens by then."""

    first_s: float
    latest_s: float
    num_tokens: int


class OpenCollector:
    """What admission counts: the requests between their arrival and the end of their response."""

    def __init__(self, read_open: Callable[[], tuple[int, int]]) -> None:
        self._read_open = read_open

    def collect(self) -> Iterator[Metric]:
        """The families, as prometheus_client wants them."""
        num_prompts, num_tokens = self._read_open()
        yield GaugeMetricFamily("quantpipe:open_prompts", "Prompts being answered, each sample counted", num_prompts)
        yield GaugeMetricFamily("quantpipe:open_tokens", "Their tokens, with those they may yet get", num_tokens)


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
    """Counters of one server, in a registry of their own, and the figures of the last minute.

    ``read_open`` gives how many prompts and tokens are open.
    """

    def __init__(self, read_stats: Callable[[], EngineStats], read_open: Callable[[], tuple[int, int]]) -> None:
        self.recent = {name: RecentValues() for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")}
        self.recent_tokens = SlidingSum(RATE_WINDOW_S)
        self.finished: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(read_stats))
        self._registry.register(OpenCollector(read_open))
        histogram, counter = self._histogram, self._counter
        self._queue = histogram("request_queue_time_seconds", "Wait in the engine until begun, per prompt", LATENCY_S)
        self._ttft = histogram("time_to_first_token_seconds", "Request accepted to first text", TTFT_S)
        self._prefill = histogram("request_prefill_time_seconds", "Begun to first text, per prompt", TTFT_S)
        self._itl = histogram("inter_token_latency_seconds", "Between two texts of a choice, per token", TPOT_S)
        self._tpot = histogram("request_time_per_output_token_seconds", "Per choice, after the first text", TPOT_S)
        self._decode = histogram("request_decode_time_seconds", "First to last text, per choice", LATENCY_S)
        self._latency = histogram("e2e_request_latency_seconds", "Request accepted to last text, per choice", LATENCY_S)
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request", LENGTHS)
        self._new_tokens = histogram("request_generation_tokens", "Tokens generated for a choice", LENGTHS)
        self._finished = counter("request_success", "Choices that ended", "finished_reason")
        self._errors = counter("request_errors", "Requests that ended with an error", "code")
        self._responses = counter("http_responses", "Responses", "status")
        self._ignored = counter("ignored_fields", "Fields that mean nothing here")

    def count_ignored(self, num_fields: int) -> None:
        """A request had so many fields that were ignored."""
        self._ignored.inc(num_fields)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return bytes(generate_latest(self._registry))

    async def observe(
        self, deltas: AsyncIterator[tuple[int, TextDelta]], num_choices: int
    ) -> AsyncIterator[tuple[int, TextDelta]]:
        """Pass the deltas of one request on, and time them from now. Choices that never end count as aborted."""
        started_s = time.monotonic()
        times: dict[int, ChoiceTimes] = {}
        num_ended = 0
        try:
            async for index, delta in deltas:
                now_s = time.monotonic()
                own = times.get(index)
                if own is None:
                    own = times[index] = ChoiceTimes(now_s, now_s, 0)
                    self._observe_first(now_s - started_s, delta.queued_s)
                elif delta.num_tokens > own.num_tokens:
                    num_tokens = delta.num_tokens - own.num_tokens
                    self._itl.observe((now_s - own.latest_s) / num_tokens)
                self.recent_tokens.add(delta.num_tokens - own.num_tokens)
                own.latest_s, own.num_tokens = now_s, delta.num_tokens
                if delta.finish_reason is not None:
                    num_ended += 1
                    self._observe_last(started_s, own, delta.finish_reason)
                yield index, delta
        finally:
            if num_ended < num_choices:
                self._count_finished("abort", num_choices - num_ended)

    def count_exchange(self, exchange: Exchange) -> None:
        """A request was answered, or its client is gone."""
        if exchange.status is not None:
            self._responses.labels(str(exchange.status)).inc()
        if exchange.error is not None:
            self.errors[exchange.error] += 1
            self._errors.labels(exchange.error).inc()
        if exchange.first_s is not None:
            self._prompt_tokens.observe(exchange.num_prompt_tokens)

    def _observe_first(self, ttft_s: float, queued_s: float | None) -> None:
        self._ttft.observe(ttft_s)
        self.recent["ttft_s"].add(ttft_s)
        if queued_s is not None:
            self._queue.observe(queued_s)
            self._prefill.observe(max(0.0, ttft_s - queued_s))
            self.recent["queue_s"].add(queued_s)

    def _observe_last(self, started_s: float, own: ChoiceTimes, finish_reason: str) -> None:
        self._count_finished(finish_reason, 1)
        self._latency.observe(own.latest_s - started_s)
        self.recent["e2e_s"].add(own.latest_s - started_s)
        self._decode.observe(own.latest_s - own.first_s)
        self._new_tokens.observe(own.num_tokens)
        if own.num_tokens > 1:
            tpot_s = (own.latest_s - own.first_s) / (own.num_tokens - 1)
            self._tpot.observe(tpot_s)
            self.recent["tpot_s"].add(tpot_s)

    def _count_finished(self, reason: str, number: int) -> None:
        self.finished[reason] += number
        self._finished.labels(reason).inc(number)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"quantpipe:{name}", text, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> PrometheusCounter:
        return PrometheusCounter(f"quantpipe:{name}", text, labels, registry=self._registry)
