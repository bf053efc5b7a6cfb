"""What is counted, from deltas and over HTTP, and that vLLM's dashboards find the names that they ask for."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from quantpipe.engine.stats import EngineStats
from quantpipe.serve.engine_metrics import EngineReader
from quantpipe.serve.exchange import Exchange
from quantpipe.serve.generation import TextDelta
from quantpipe.serve.metrics import ServerMetrics

# Series that the example dashboards of vLLM ask for, without its prefix.
VLLM_NAMES = {
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
}
StartServer = Callable[..., Any]
MakeEngine = Callable[..., Any]


@pytest.fixture
def metrics() -> ServerMetrics:
    stats = EngineStats(1, 2, 3, 4, 7, 5, 60, 70, 8)
    return ServerMetrics([EngineReader(None, lambda: stats, lambda: 6)], lambda: (9, 100))


def value(metrics: ServerMetrics, series: str) -> float:
    lines = dict(line.rsplit(" ", 1) for line in metrics.exposition().decode().splitlines() if line[0] != "#")
    return float(lines[f"quantpipe:{series}"])


async def given(*deltas: TextDelta, error: Exception | None = None) -> AsyncIterator[tuple[int, TextDelta]]:
    for delta in deltas:
        yield 0, delta
    if error is not None:
        raise error


def delta(num_tokens: int, finish_reason: Any = None, queued_s: float | None = 0.25) -> TextDelta:
    return TextDelta("x", (), num_tokens, finish_reason, queued_s=queued_s)


def consume(
    metrics: ServerMetrics,
    deltas: AsyncIterator[tuple[int, TextDelta]],
    num_choices: int = 1,
    submitted_ago_s: float = 0.0,
) -> int:
    async def main() -> int:
        return sum(
            [1 async for _ in metrics.requests[0].observe(deltas, num_choices, time.monotonic() - submitted_ago_s)]
        )

    return asyncio.run(main())


def test_choice_is_timed_and_counted_once(metrics: ServerMetrics) -> None:
    assert consume(metrics, given(delta(1), delta(3), delta(3), delta(4, "length"))) == 4
    for histogram in ("time_to_first_token", "request_queue_time", "request_prefill_time", "e2e_request_latency"):
        assert value(metrics, f"{histogram}_seconds_count") == 1
    assert value(metrics, "request_queue_time_seconds_sum") == 0.25
    assert value(metrics, "inter_token_latency_seconds_count") == 2  # one piece brought no token
    assert value(metrics, 'request_generation_tokens_bucket{le="5.0"}') == 1
    assert value(metrics, "request_generation_tokens_sum") == 4
    assert value(metrics, 'request_success_total{finished_reason="length"}') == 1
    assert metrics.requests[0].recent_tokens.total == 4
    assert metrics.requests[0].recent["queue_s"].percentiles().p50 == 0.25


def test_time_to_the_first_token_is_that_from_the_submission(metrics: ServerMetrics) -> None:
    """An engine that is busy accepts a request together with its first token."""
    consume(metrics, given(delta(1, "stop", queued_s=2.0)), submitted_ago_s=3.0)
    assert 3.0 <= value(metrics, "time_to_first_token_seconds_sum") < 4.0
    assert 1.0 <= value(metrics, "request_prefill_time_seconds_sum") < 2.0


def test_choices_that_never_end_are_aborted(metrics: ServerMetrics) -> None:
    with pytest.raises(ValueError):
        consume(metrics, given(delta(1), error=ValueError("broken")), num_choices=3)
    assert value(metrics, 'request_success_total{finished_reason="abort"}') == 3
    assert metrics.requests[0].finished == {"abort": 3}


def test_fork_has_no_queue_time_of_its_own(metrics: ServerMetrics) -> None:
    consume(metrics, given(delta(1, "stop", queued_s=None)))
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "time_to_first_token_seconds_count") == 1


def test_answers_and_errors_are_counted_by_status_and_code(metrics: ServerMetrics) -> None:
    exchange = Exchange("id", "POST", "/", "127.0.0.1")
    exchange.status, exchange.error = 503, "queue_full"
    metrics.count_exchange(exchange)
    exchange.status, exchange.error, exchange.first_s, exchange.num_prompt_tokens = 200, None, 1.0, 30
    metrics.count_exchange(exchange)
    assert value(metrics, 'http_responses_total{status="503"}') == 1
    assert value(metrics, 'request_errors_total{code="queue_full"}') == 1
    assert value(metrics, "request_prompt_tokens_sum") == 30
    assert value(metrics, "open_prompts") == 9 and value(metrics, "open_tokens") == 100


def names_of(text: str) -> set[str]:
    return {re.split(r"[{ ]", line)[0].removeprefix("quantpipe:") for line in text.splitlines() if line[0] != "#"}


def test_dashboards_made_for_vllm_find_their_series(server: Any) -> None:
    server.post("/v1/completions", model="echo", prompt="abc")
    assert names_of(server.http.get("/metrics").text) >= VLLM_NAMES


def test_stats_show_requests_tokens_blocks_and_latency(start_server: StartServer, make_engine: MakeEngine) -> None:
    server = start_server(make_engine(step_s=0.002))
    server.post("/v1/completions", model="echo", prompt="abcd", max_tokens=3)
    server.post("/v1/completions", model="wrong", prompt="abcd")
    stats = server.http.get("/stats").json()
    assert stats["requests"]["finished"] == {"length": 1}
    assert stats["requests"]["errors"] == {"model_not_found": 1}
    assert (stats["tokens"]["generated"], stats["tokens"]["generated_per_s"]) == (3, 0.3)
    assert stats["latency"]["ttft_s"]["num"] == 1 and 0 < stats["latency"]["ttft_s"]["p50"] < 10
    assert stats["latency"]["tpot_s"]["p95"] > 0
    assert stats["kv"] == {"usage_frac": 0.0, "held": 0, "cached": 0, "free": 99}
    assert (stats["served"]["model"], stats["served"]["artifact"]) == ("echo", None)
