"""What it costs to compare two models on held-out text, and how far a stored baseline's KL is from the exact one.

    python bench/fidelity.py --base BASE --model ARTIFACT --text TEXT --num-windows 16 --window-tokens 256 --threads 1

`run` runs both models side by side; `store K` runs the baseline and keeps K tokens of each position; `stored K`
compares the candidate with that. Seconds are of processor time per 10,000 tokens; peak is the resident memory of the
process beyond what it held before; bytes are those stored per token. Mean and 99th percentile of KL are in nats, and
`of exact` is the mean next to that of `run`.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.engine import Engine
from quantpipe.engine.tokenizer import Tokenizer
from quantpipe.evaluate.divergence import DivergenceResult, measure_against, measure_divergence, windows_from_text
from quantpipe.evaluate.fidelity.reference import TOP_K, make_reference
from quantpipe.gate.record import machine_facts, utc_now

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost:
    """Processor seconds, and how far resident memory rose above where it was, in MB."""

    cpu_s: float
    peak_mb: float


def status_mb(name: str) -> float:
    """A field of Linux's process status, such as the peak of resident memory."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def costing(work: Callable[[], Result]) -> tuple[Result, Cost]:
    """What ``work`` returns, and what it took."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before_mb, started_s = status_mb("VmRSS"), time.process_time()
    result = work()
    return result, Cost(time.process_time() - started_s, max(0.0, status_mb("VmHWM") - before_mb))


def row(name: str, cost: Cost, num_tokens: int, token_bytes: str, figures: str) -> str:
    return f"| {name} | {1e4 * cost.cpu_s / num_tokens:.1f} | {cost.peak_mb:.0f} | {token_bytes} | {figures} |"


def figures_of(result: DivergenceResult, exact_kl: float) -> str:
    mean_kl = next(each.value for each in result.measurements if each.name.startswith("mean_kl"))
    return f"{mean_kl:.4g} | {result.p99_kl:.3g} | {mean_kl / exact_kl if exact_kl else 1:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--num-windows", type=int, default=16)
    parser.add_argument("--window-tokens", type=int, default=256)
    parser.add_argument("--top-k", type=int, nargs="+", default=[16, 64, TOP_K, 512])
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    windows = windows_from_text(asked.text, Tokenizer.open(asked.base), asked.num_windows, asked.window_tokens)
    num_tokens = asked.num_windows * asked.window_tokens
    config = EngineConfig(num_threads=asked.threads, max_model_len=asked.window_tokens)
    base, cand = Engine.open(asked.base, config), Engine.open(asked.model, config)
    for engine in (base, cand):
        engine.warm_up()
    print(f"{utc_now()}; {machine_facts()}; {asked.model.name}; {num_tokens:,} tokens\n")
    print("| how | CPU s per 10k tokens | peak, MB | bytes per token | mean KL | p99 KL | of exact |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    exact, cost = costing(lambda: measure_divergence(base, cand, windows))
    exact_kl = next(each.value for each in exact.measurements if each.name == "mean_kl")
    print(row("run", cost, num_tokens, "0", figures_of(exact, exact_kl)), flush=True)
    for top_k in asked.top_k:
        reference, cost = costing(lambda top_k=top_k: make_reference(base, windows, top_k))  # type: ignore[misc]
        print(row(f"store {top_k}", cost, num_tokens, f"{reference.token_bytes:.0f}", "- | - | -"), flush=True)
        bound, cost = costing(lambda reference=reference: measure_against(reference, cand, windows))  # type: ignore[misc]
        print(row(f"stored {top_k}", cost, num_tokens, "0", figures_of(bound, exact_kl)), flush=True)


if __name__ == "__main__":
    main()
