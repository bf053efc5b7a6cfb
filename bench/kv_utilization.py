"""How much of the memory for keys and values holds any: blocks against room reserved for the longest sequence.

    python bench/kv_utilization.py TRACE.csv --num-requests 200 --scale 0.25 --load 1.5

The requests of a trace on a simulated clock (``simulation.py`` says what a step costs there), once for each way to
share the same pool of ``--pool-tokens``. Reserving ``max_model_len`` is the same scheduler with one block of that size
for each sequence; reserving ``max_tokens`` gives blocks, and admits only whom they last for to the end; the others
admit more. The prefix cache is off.

Columns, the first three over the time in which requests wait, as only then does the memory decide: the share of the
pool that holds keys and values, the share of what is given out that does, and how many sequences run; then output
tokens per second over all, seconds to the first token, and tokens computed again after preemption, in percent.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from request_trace import at_load, describe, read_trace
from simulation import Arrival, Simulation

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.scheduler import Scheduler
from quantpipe.engine.step import Step


class Usage:
    """Seconds while requests wait, and what was held in them on average."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.seconds = 0.0
        self.tokens = self.slots = self.sequences = 0.0

    def watch(self, scheduler: Scheduler, step: Step, step_s: float) -> None:
        if not scheduler.waiting:
            return
        self.seconds += step_s
        self.tokens += step_s * sum(advance.end for advance in step.advances)
        self.slots += step_s * scheduler.pool.num_held * self._block_size
        self.sequences += step_s * len(scheduler.running)


def variants(asked: argparse.Namespace) -> dict[str, EngineConfig]:
    paged = EngineConfig(
        max_num_seqs=256, max_num_batched_tokens=512, max_model_len=asked.max_model_len, prefix_cache=False
    )
    return {
        "max_model_len reserved": dataclasses.replace(paged, block_size=asked.max_model_len, admission="reserve"),
        "blocks, max_tokens reserved": dataclasses.replace(paged, admission="reserve"),
        "blocks, peak": dataclasses.replace(paged, admission="peak"),
        "blocks, greedy": dataclasses.replace(paged, admission="greedy"),
    }


def row(name: str, config: EngineConfig, arrivals: list[Arrival], pool_tokens: int) -> str:
    usage = Usage(config.block_size)
    run = Simulation(config, pool_tokens // config.block_size, arrivals, usage.watch)
    run.run()
    seconds = max(usage.seconds, 1e-9)
    first_s = np.percentile([served.first_token_s for served in run.served], [50, 99])
    num_new = sum(served.arrival.num_new for served in run.served)
    return (
        f"| {name} | {usage.tokens / seconds / pool_tokens:.0%} | {usage.tokens / max(usage.slots, 1e-9):.0%} | "
        f"{usage.sequences / seconds:.1f} | {num_new / run.now_s:.0f} | {first_s[0]:.1f} / {first_s[1]:.1f} | "
        f"{run.num_computed_tokens / run.num_needed_tokens - 1:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--num-requests", type=int, default=200)
    parser.add_argument("--scale", type=float, default=0.25, help="of lengths")
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--pool-tokens", type=int, default=8192)
    asked = parser.parse_args()
    arrivals = read_trace(asked.trace, asked.num_requests, asked.scale, asked.max_model_len)
    unlimited = Simulation(variants(asked)["blocks, greedy"], 1 << 20, at_load(arrivals, 0.0, 0.0))
    unlimited.run()
    print(
        f"{describe(arrivals)}; {unlimited.now_s / asked.load:.0f} s at load {asked.load}, in {asked.pool_tokens:,}\n"
    )
    print("| memory | of the pool | of what is given | running | tok/s | first token, s (P50 / P99) | recomputed |")
    print("|---|---:|---:|---:|---:|---|---:|")
    for name, config in variants(asked).items():
        print(row(name, config, at_load(arrivals, unlimited.now_s, asked.load), asked.pool_tokens), flush=True)


if __name__ == "__main__":
    main()
