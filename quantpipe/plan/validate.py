"""Prediction against a measured run: memory and times of an artifact on this machine's CPU. Opens the engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quantpipe.bench.latency import Clock, percentile, time_burst
from quantpipe.bench.workload import text_prompts, vocabulary_text
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.device_memory import HostMemory
from quantpipe.engine.engine import Engine
from quantpipe.errors import RecipeError
from quantpipe.plan.burst import times_at
from quantpipe.plan.devices import Device, GivenSpeeds, host_device
from quantpipe.plan.memory import MAX_BATCHED_TOKENS, Load, memory_at
from quantpipe.plan.shape import ModelShape
from quantpipe.plan.subject import Subject
from quantpipe.plan.text import table

NEW_TOKENS = 16
ClockName = Literal["wall", "cpu"]
CLOCKS: dict[ClockName, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
NUM_BURSTS = 3  # of which the best counts, after one that warms up


@dataclass(frozen=True)
class Compared:
    """One figure, predicted and measured, in ``unit``."""

    name: str
    unit: str
    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        """Of the prediction, next to what was measured."""
        return 100 * (self.predicted - self.measured) / self.measured


def validate(
    subject: Subject,
    folder: Path,
    concurrencies: Sequence[int],
    contexts: Sequence[int],
    given: GivenSpeeds,
    clock: ClockName,
) -> tuple[Compared, ...]:
    """Measure the folder at every load. RecipeError for a model that the runtime does not serve.

    ``wall`` is for an idle machine; ``cpu`` is the processor time of one thread, which other programs hardly change.
    """
    shape = subject.shape
    if not shape.is_served:
        raise RecipeError(f"--validate: {shape.where} is not served by the bundled runtime; nothing can be measured")
    most, longest = max(concurrencies), max(contexts)
    num_threads = 1 if clock == "cpu" else None
    load = Load(most, longest + NEW_TOKENS, subject.kv_dtype, NEW_TOKENS)
    engine = Engine.open(folder, _config(subject.kv_dtype, most, longest, num_threads))
    device = host_device(given, num_threads)
    rows = _times(engine, shape, lambda: host_device(given, num_threads), load, concurrencies, contexts, CLOCKS[clock])
    return (*_memory(engine, shape, device, load), *rows)


def render(rows: Sequence[Compared]) -> str:
    """A table of them."""
    cells = ((f"{r.name}, {r.unit}", _cell(r.predicted), _cell(r.measured), f"{r.error_percent:+.0f} %") for r in rows)
    return table(("figure", "predicted", "measured", "error"), cells) + "\n"


def _cell(value: float) -> str:
    return f"{value:,.1f}"


def _config(kv_dtype: str, most: int, longest: int, num_threads: int | None) -> EngineConfig:
    return EngineConfig(
        kv_dtype=kv_dtype,
        max_num_seqs=most,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, most),
        max_model_len=longest + NEW_TOKENS,
        prefix_cache=False,
        num_threads=num_threads,
    )


def _memory(engine: Engine, shape: ModelShape, device: Device, load: Load) -> tuple[Compared, ...]:
    """After the largest load, which has written all keys and values that it can."""
    expected, account = memory_at(shape, device, load), engine.memory
    resident = HostMemory().used_bytes()
    return (
        Compared("weights", "MB", expected.weight_bytes / 1e6, account.weight_bytes / 1e6),
        Compared("KV cache", "MB", expected.kv_bytes / 1e6, account.kv_cache_bytes / 1e6),
        Compared("resident in all", "MB", expected.total_bytes / 1e6, resident / 1e6),
    )


def _times(
    engine: Engine,
    shape: ModelShape,
    device_now: Callable[[], Device],
    load: Load,
    concurrencies: Sequence[int],
    contexts: Sequence[int],
    clock: Clock,
) -> list[Compared]:
    """The device is measured anew beside each load: on a machine that is not idle its speeds change by the minute."""
    rows = []
    for concurrency in concurrencies:
        for context in contexts:
            ttft_s, tpot_s = _measure(engine, concurrency, context, clock)
            expected = times_at(
                shape, device_now(), replace(load, concurrency=concurrency, context=context + NEW_TOKENS)
            )
            at = f"{concurrency} x {context}"
            rows.append(Compared(f"TTFT {at}", "ms", 1e3 * expected.ttft_s, 1e3 * ttft_s))
            rows.append(Compared(f"TPOT {at}", "ms", 1e3 * expected.tpot_s, 1e3 * tpot_s))
    return rows


def _measure(engine: Engine, concurrency: int, context: int, clock: Clock) -> tuple[float, float]:
    """TTFT and TPOT in seconds, medians over requests; of the best burst: what is possible while nothing else runs."""
    num_prompts = concurrency * (NUM_BURSTS + 1)
    special_ids = engine.description.eos_token_ids
    text = vocabulary_text(engine.description.vocab_size, special_ids, context + 8 * num_prompts, seed=0)
    prompts = text_prompts(text, num_prompts, context, seed=0)
    ttfts_s, tpots_s = [], []
    for burst in range(NUM_BURSTS + 1):
        own = prompts[burst * concurrency : (burst + 1) * concurrency]
        requests, _ = time_burst("plan", engine, own, NEW_TOKENS, clock)
        ttfts_s.append(percentile([each.ttft_s for each in requests], 50))
        tpots_s.append(percentile([each.tpot_s for each in requests], 50))
    return min(ttfts_s[1:]), min(tpots_s[1:])
