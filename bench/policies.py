"""Scheduling policies against each other under a mixed load of short and long requests, on a simulated clock.

    python bench/policies.py --num-requests 1500 --load 0.9
    python bench/policies.py --num-requests 1500 --load 1.2        # more than can be served, for as long as they arrive

The scheduler is the real one; the model is not run: ``simulation.py`` says how long a step is taken to last. Seven of
ten requests are short (32-256 prompt tokens, 8-128 new ones, wanted within 10 s), the others long (1,000-4,000 and
64-512, within 90 s). Outputs end by themselves: the scheduler sees only ``max_tokens`` (128 or 512). Every tenth
request of either kind has priority -5. They arrive at random, at ``--load`` times the rate that is served when all are
there from the beginning.

Columns: seconds from arrival to the first token and to the last one, for short and long requests, and to the last one
for those with priority; the gap between two tokens of a request, 99th percentile; the longest wait for a first token;
requests that met their deadline; tokens computed again after preemption, in percent of those needed.
"""

import argparse
import dataclasses
import random

import numpy as np
from simulation import Arrival, Served, Simulation

from quantpipe.engine.config import EngineConfig
from quantpipe.engine.request import Request, SamplingParams

NUM_BLOCKS = 2048
CONFIG = EngineConfig(max_num_seqs=32, max_num_batched_tokens=512)
VARIANTS: dict[str, EngineConfig] = {
    "fcfs": CONFIG,
    "fcfs, chunks of 128, 1 long at a time": dataclasses.replace(
        CONFIG, max_prefill_chunk=128, max_long_prefills=1, long_prompt_tokens=512
    ),
    "fcfs, steps of 0.1 s": dataclasses.replace(CONFIG, target_step_s=0.1),
    "fcfs, greedy": dataclasses.replace(CONFIG, admission="greedy"),
    "fcfs, reserve": dataclasses.replace(CONFIG, admission="reserve"),
    "priority": dataclasses.replace(CONFIG, policy="priority"),
    "shortest": dataclasses.replace(CONFIG, policy="shortest"),
    "shortest, 1 long at a time": dataclasses.replace(
        CONFIG, policy="shortest", max_prefill_chunk=128, max_long_prefills=1, long_prompt_tokens=512
    ),
    "deadline": dataclasses.replace(CONFIG, policy="deadline"),
}


def arrivals(num_requests: int, rate: float, seed: int) -> list[Arrival]:
    """``rate`` 0: all at once."""
    rng = random.Random(seed)
    now_s, made = 0.0, []
    for number in range(num_requests):
        now_s += rng.expovariate(rate) if rate else 0.0
        is_long = rng.random() < 0.3
        num_prompt, num_new = (
            (rng.randrange(1000, 4001), rng.randrange(64, 513))
            if is_long
            else (rng.randrange(32, 257), rng.randrange(8, 129))
        )
        request = Request(
            str(number),
            tuple(rng.randrange(50_000) for _ in range(num_prompt)),
            SamplingParams(max_tokens=512 if is_long else 128),
            priority=-5 if rng.random() < 0.1 else 0,
            deadline_s=90.0 if is_long else 10.0,
            arrival_s=now_s,
        )
        made.append(Arrival(request, num_new))
    return made


def is_long_one(served: Served) -> bool:
    return served.arrival.request.params.max_tokens > 128


def row(name: str, run: Simulation) -> str:
    cells = []
    for is_long in (False, True):
        some = [served for served in run.served if is_long_one(served) == is_long]
        for times_s in ([served.first_token_s for served in some], [served.latency_s for served in some]):
            cells.append("{:.1f} / {:.1f}".format(*np.percentile(times_s, [50, 99])))
    urgent_s = [served.latency_s for served in run.served if served.arrival.request.priority < 0]
    cells.append("{:.1f} / {:.1f}".format(*np.percentile(urgent_s, [50, 99])))
    gaps_s = np.concatenate([np.diff(served.token_times_s) for served in run.served])
    cells.append(f"{np.percentile(gaps_s, 99):.2f}")
    cells.append(f"{max(served.first_token_s for served in run.served):.1f}")
    cells.append(f"{np.mean([served.is_in_time for served in run.served]):.1%}")
    cells.append(f"{run.num_computed_tokens / run.num_needed_tokens - 1:.1%}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=1500)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    at_once = Simulation(CONFIG, NUM_BLOCKS, arrivals(asked.num_requests, 0, asked.seed))
    at_once.run()
    rate = asked.load * asked.num_requests / at_once.now_s
    print(f"{asked.num_requests} requests, {rate:.3f} per second: {asked.load} of what is served at best\n")
    print(
        "| scheduling | short: first token, s (P50 / P99) | short: last | long: first | long: last | urgent: last "
        "| gap P99, s | longest wait, s | in time | recomputed |"
    )
    print("|---|---|---|---|---|---|---:|---:|---:|---:|")
    for name, config in VARIANTS.items():
        run = Simulation(config, NUM_BLOCKS, arrivals(asked.num_requests, rate, asked.seed))
        run.run()
        print(row(name, run), flush=True)


if __name__ == "__main__":
    main()
