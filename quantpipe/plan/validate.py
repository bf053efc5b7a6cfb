"""Prediction against a measured run: memory and times of an artifact on this machine's CPU. Opens the engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantpipe.bench.latency import percentile, time_burst
from quantpipe.bench.workload import text_prompts, vocabulary_text
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.device_memory import HostMemory
from quantpipe.engine.engine import Engine
from quantpipe.errors import RecipeError
from quantpipe.plan.devices import CPU, Device, GivenSpeeds, find_device
from quantpipe.plan.memory import MAX_BATCHED_TOKENS, Load, memory_at
from quantpipe.plan.roofline import decode_step, first_half, prefill
from quantpipe.plan.shape import ModelShape
from quantpipe.plan.subject import Subject
from quantpipe.plan.text import table

NEW_TOKENS = 16
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


@dataclass(frozen=True)
class BurstTimes:
    """Medians over the requests of one burst."""

    ttft_s: float
    tpot_s: float


def expected_burst(shape: ModelShape, device: Device, load: Load, prompt_tokens: int) -> BurstTimes:
    """Of requests that come together: those whose prompts are read first go on beside the others' prompts."""
    num = load.concurrency
    prompts_s = prefill(shape, device, num, prompt_tokens).expected_s(device)
    ttft_s = prompts_s * first_half(num, prompt_tokens) / num
    step_s = decode_step(shape, device, load, prompt_tokens + NEW_TOKENS // 2).expected_s(device)
    return BurstTimes(ttft_s, step_s + (prompts_s - ttft_s) / (NEW_TOKENS - 1))


def validate(
    subject: Subject, folder: Path, concurrencies: Sequence[int], contexts: Sequence[int], given: GivenSpeeds
) -> tuple[Compared, ...]:
    """Measure the folder at every load. RecipeError for a model that the runtime does not serve."""
    shape = subject.shape
    if not shape.is_served:
        raise RecipeError(f"--validate: {shape.where} is not served by the bundled runtime; nothing can be measured")
    most, longest = max(concurrencies), max(contexts)
    device = find_device(CPU, given)
    load = Load(most, longest + NEW_TOKENS, subject.kv_dtype)
    engine = Engine.open(folder, _config(subject.kv_dtype, most, longest))
    rows = _times(engine, shape, device, load, concurrencies, contexts)
    return (*_memory(engine, shape, device, load), *rows)


def render(rows: Sequence[Compared]) -> str:
    """A table of them."""
    cells = ((f"{r.name}, {r.unit}", _cell(r.predicted), _cell(r.measured), f"{r.error_percent:+.0f} %") for r in rows)
    return table(("figure", "predicted", "measured", "error"), cells) + "\n"


def _cell(value: float) -> str:
    return f"{value:,.1f}"


def _config(kv_dtype: str, most: int, longest: int) -> EngineConfig:
    return EngineConfig(
        kv_dtype=kv_dtype,
        max_num_seqs=most,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, most),
        max_model_len=longest + NEW_TOKENS,
        prefix_cache=False,
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
    device: Device,
    load: Load,
    concurrencies: Sequence[int],
    contexts: Sequence[int],
) -> list[Compared]:
    rows = []
    for concurrency in concurrencies:
        for context in contexts:
            measured = _measure(engine, concurrency, context)
            own = expected_burst(shape, device, replace(load, concurrency=concurrency), context)
            at = f"{concurrency} x {context}"
            rows.append(Compared(f"TTFT {at}", "ms", 1e3 * own.ttft_s, 1e3 * measured.ttft_s))
            rows.append(Compared(f"TPOT {at}", "ms", 1e3 * own.tpot_s, 1e3 * measured.tpot_s))
    return rows


def _measure(engine: Engine, concurrency: int, context: int) -> BurstTimes:
    """The best burst: what the machine does while nothing else runs."""
    num_prompts = concurrency * (NUM_BURSTS + 1)
    special_ids = engine.description.eos_token_ids
    text = vocabulary_text(engine.description.vocab_size, special_ids, context + 8 * num_prompts, seed=0)
    prompts = text_prompts(text, num_prompts, context, seed=0)
    found = []
    for burst in range(NUM_BURSTS + 1):
        own = prompts[burst * concurrency : (burst + 1) * concurrency]
        requests, _ = time_burst("plan", engine, own, NEW_TOKENS, time.perf_counter)
        ttft_s = percentile([each.ttft_s for each in requests], 50)
        found.append(BurstTimes(ttft_s, percentile([each.tpot_s for each in requests], 50)))
    return BurstTimes(min(own.ttft_s for own in found[1:]), min(own.tpot_s for own in found[1:]))
