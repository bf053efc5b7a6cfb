"""The bench on the real engine: what it needs of it is there, and it leaves it as it found it."""

from collections.abc import Callable
from pathlib import Path

from quantpipe.bench.latency import run_bench
from quantpipe.bench.workload import vocabulary_text
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.gate.judge import measurement_problem
from quantpipe.recipe.schema import BenchSection


def test_two_real_engines_are_benched_and_left_idle(random_llama: Callable[..., Path]) -> None:
    folder = random_llama()
    config = EngineConfig(
        backend="reference", max_model_len=32, max_num_seqs=4, max_num_batched_tokens=16, num_threads=1
    )
    engines = {name: Engine.open(folder, config) for name in ("baseline", "candidate")}
    section = BenchSection.model_validate({"concurrency": (1, 3), "prompt_tokens": 12, "new_tokens": 6, "repeats": 2})
    text = vocabulary_text(128, special_ids=(1, 2), num_tokens=200, seed=0)
    result = run_bench(engines, section, text)
    assert len(result.measurements) == 6
    assert all(measurement_problem(m) is None for m in result.measurements)
    # 3 prompts of 12 tokens do not fit one step of 16: the first token does not come to all at once
    burst = next(run for run in result.runs if run.concurrency == 3)
    assert len({request.ttft_s for request in burst.requests}) > 1
    assert all(request.num_tokens == 6 and request.e2e_s > request.ttft_s > 0 for request in burst.requests)
    for engine in engines.values():
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
        assert stats.generated_tokens == 6 * (1 + 3) * 3
