"""What is counted of the requests that one arm answers, in Prometheus form, and the figures of the last minute."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PrometheusCounter

from quantpipe.serve.admission.sliding_sum import SlidingSum
from quantpipe.serve.generation import TextDelta
from quantpipe.serve.recent import RecentValues

# Limits of the histograms' buckets, in seconds and in tokens.
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
LATENCY_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
RATE_WINDOW_S = 10

HISTOGRAMS = (
    ("request_queue_time_seconds", "Wait in the engine until begun, per prompt", LATENCY_S),
    ("time_to_first_token_seconds", "Handed to the engine to first text", TTFT_S),
    ("request_prefill_time_seconds", "Begun to first text, per prompt", TTFT_S),
    ("inter_token_latency_seconds", "Between two texts of a choice, per token", TPOT_S),
    ("request_time_per_output_token_seconds", "Per choice, after the first text", TPOT_S),
    ("request_decode_time_seconds", "First to last text, per choice", LATENCY_S),
    ("e2e_request_latency_seconds", "Handed to the engine to last text, per choice", LATENCY_S),
    ("request_prompt_tokens", "Prompt tokens of a request", LENGTHS),
    ("request_generation_tokens", "Tokens generated for a choice", LENGTHS),
)


@dataclass
class ChoiceTimes:
    """When a choice had its first and its latest text, and how many tokens by then."""

    first_s: float
    latest_s: float
    num_tokens: int


class RequestFamilies:
    """The metrics of requests, of all arms. ``labels`` are the names of those that tell arms apart."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, ...]) -> None:
        self.histograms: Mapping[str, Histogram] = {
            name: Histogram(f"quantpipe:{name}", text, labels, buckets=buckets, registry=registry)
            for name, text, buckets in HISTOGRAMS
        }
        finished = ("finished_reason", *labels)
        self.finished = PrometheusCounter(
            "quantpipe:request_success", "Choices that ended", finished, registry=registry
        )


class RequestMetrics:
    """What one arm's requests came to; ``arm`` None where it is the only one, and no label tells."""

    def __init__(self, families: RequestFamilies, arm: str | None) -> None:
        self.recent = {name: RecentValues() for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")}
        self.recent_tokens = SlidingSum(RATE_WINDOW_S)
        self.finished: Counter[str] = Counter()
        self._labels = () if arm is None else (arm,)
        self._finished = families.finished
        self._histograms = {
            name: histogram.labels(*self._labels) if self._labels else histogram
            for name, histogram in families.histograms.items()
        }

    async def observe(
        self, deltas: AsyncIterator[tuple[int, TextDelta]], num_choices: int, submitted_s: float
    ) -> AsyncIterator[tuple[int, TextDelta]]:
        """Pass the deltas of one request on, and time them from ``submitted_s``, when it was handed to the engine.

        When the engine accepts it is no beginning: a busy one may do so with its first token. Choices that never end
        count as aborted.
        """
        times: dict[int, ChoiceTimes] = {}
        num_ended = 0
        try:
            async for index, delta in deltas:
                now_s = time.monotonic()
                own = times.get(index)
                if own is None:
                    own = times[index] = ChoiceTimes(now_s, now_s, 0)
                    self._observe_first(now_s - submitted_s, delta.queued_s)
                elif delta.num_tokens > own.num_tokens:
                    num_tokens = delta.num_tokens - own.num_tokens
                    self._observe("inter_token_latency_seconds", (now_s - own.latest_s) / num_tokens)
                self.recent_tokens.add(delta.num_tokens - own.num_tokens)
                own.latest_s, own.num_tokens = now_s, delta.num_tokens
                if delta.finish_reason is not None:
                    num_ended += 1
                    self._observe_last(submitted_s, own, delta.finish_reason)
                yield index, delta
        finally:
            if num_ended < num_choices:
                self.count_finished("abort", num_choices - num_ended)

    def count_prompt_tokens(self, num_tokens: int) -> None:
        """A request that was begun had so many."""
        self._observe("request_prompt_tokens", num_tokens)

    def count_finished(self, reason: str, number: int) -> None:
        """So many choices ended."""
        self.finished[reason] += number
        self._finished.labels(reason, *self._labels).inc(number)

    def _observe_first(self, ttft_s: float, queued_s: float | None) -> None:
        self._observe("time_to_first_token_seconds", ttft_s)
        self.recent["ttft_s"].add(ttft_s)
        if queued_s is not None:
            self._observe("request_queue_time_seconds", queued_s)
            self._observe("request_prefill_time_seconds", max(0.0, ttft_s - queued_s))
            self.recent["queue_s"].add(queued_s)

    def _observe_last(self, submitted_s: float, own: ChoiceTimes, finish_reason: str) -> None:
        self.count_finished(finish_reason, 1)
        self._observe("e2e_request_latency_seconds", own.latest_s - submitted_s)
        self.recent["e2e_s"].add(own.latest_s - submitted_s)
        self._observe("request_decode_time_seconds", own.latest_s - own.first_s)
        self._observe("request_generation_tokens", own.num_tokens)
        if own.num_tokens > 1:
            tpot_s = (own.latest_s - own.first_s) / (own.num_tokens - 1)
            self._observe("request_time_per_output_token_seconds", tpot_s)
            self.recent["tpot_s"].add(tpot_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
