"""One engine by itself: latency and throughput at several concurrencies, and where the time of its steps goes."""

import time
from collections.abc import Sequence

from quantpipe.bench.latency import Clock, percentile, time_burst
from quantpipe.bench.profile import HEADINGS, PhaseProfile, ProfiledEngine, profile_burst, rows
from quantpipe.bench.workload import text_prompts
from quantpipe.gate.report import markdown_table

TIME_HEADINGS = ("concurrency", "TTFT p50, ms", "TPOT p50, ms", "TPOT p90, ms", "output tok/s")


def bench_alone(
    engine: ProfiledEngine,
    concurrency: Sequence[int],
    token_source: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    has_profile: bool,
    clock: Clock = time.perf_counter,
) -> str:
    """Markdown tables. Each concurrency is measured once, after a burst that warms it up."""
    bursts_each = 3 if has_profile else 2
    prompts = iter(text_prompts(token_source, bursts_each * sum(concurrency), prompt_tokens, seed=0))
    times, profiles = [], list[PhaseProfile]()
    for num in concurrency:
        bursts = [[next(prompts) for _ in range(num)] for _ in range(bursts_each)]
        time_burst("bench", engine, bursts[0], new_tokens, clock)
        requests, wall_s = time_burst("bench", engine, bursts[1], new_tokens, clock)
        tpots_ms = [1e3 * own.tpot_s for own in requests]
        ttft_ms = 1e3 * percentile([own.ttft_s for own in requests], 50)
        tok_s = sum(own.num_tokens for own in requests) / wall_s
        percentiles = (f"{percentile(tpots_ms, percent):.2f}" for percent in (50, 90))
        times.append((str(num), f"{ttft_ms:.1f}", *percentiles, f"{tok_s:.1f}"))
        if has_profile:
            profiles += profile_burst(engine, bursts[2], new_tokens, clock)
    tables = [markdown_table(TIME_HEADINGS, times, right=set(range(len(TIME_HEADINGS))))]
    if has_profile:
        tables.append(markdown_table(HEADINGS, rows(profiles), right=set(range(1, len(HEADINGS)))))
    return "\n\n".join(tables) + "\n"
