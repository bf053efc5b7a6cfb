"""Scheduling policies against each other under a mixed load of short and long requests, on a simulated clock.

    python bench/policies.py --num-requests 1500 --load 0.9
    python bench/policies.py --num-requests 1500 --load 1.2        # more than can be served, for as long as they arrive

The scheduler is the real one; the model is not run. A step is taken to last
``BASE_S + TOKEN_S * tokens computed + CONTEXT_S * tokens of context read``, which is about what a small model takes on
a CPU. Seven of ten requests are short (32-256 prompt tokens, 8-128 new ones, wanted within 10 s), the others long
(1,000-4,000 and 64-512, within 90 s). Outputs end by themselves: the scheduler sees only ``max_tokens`` (128 or 512).
Every tenth request of either kind has priority -5. They arrive at random, at ``--load`` times the rate that is served
when all are there from the beginning.

Columns: seconds from arrival to the first token and to the last one, for short and long requests, and to the last one
for those with priority; the gap between two tokens of a request, 99th percentile; the longest wait for a first token;
requests that met their deadline; tokens computed again after preemption, in percent of those needed.
"""

import argparse
import dataclasses
import random
from dataclasses import dataclass

import numpy as np

from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import Request, SamplingParams, Sequence
from quantpipe.engine.scheduler import Scheduler
from quantpipe.engine.step import Step

BASE_S, TOKEN_S, CONTEXT_S = 5e-3, 4e-4, 1e-7
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


@dataclass(frozen=True)
class Arrival:
    """A request, and how long its output turns out to be."""

    request: Request
    num_new: int
    is_long: bool


@dataclass(frozen=True)
class Served:
    """What came of a request: when each token was there, in seconds from its arrival."""

    arrival: Arrival
    token_times_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        return self.token_times_s[0]

    @property
    def latency_s(self) -> float:
        return self.token_times_s[-1]

    @property
    def is_in_time(self) -> bool:
        deadline_s = self.arrival.request.deadline_s
        return deadline_s is None or self.latency_s <= deadline_s


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
        made.append(Arrival(request, num_new, is_long))
    return made


class Simulation:
    """One engine without a model, and the times at which its requests got their first and last tokens."""

    def __init__(self, config: EngineConfig, coming: list[Arrival]) -> None:
        pool = BlockPool(NUM_BLOCKS)
        self.scheduler = Scheduler(pool, config, 1, PrefixCache(pool, config.block_size))
        self.num_computed_tokens = 0
        self.now_s = 0.0
        self.served: list[Served] = []
        self._coming = coming[::-1]
        self._arrivals: dict[Sequence, Arrival] = {}
        self._token_times_s: dict[Sequence, list[float]] = {}

    def run(self) -> None:
        while self._coming or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:
                self.now_s = max(self.now_s, self._coming[-1].request.arrival_s)
            while self._coming and self._coming[-1].request.arrival_s <= self.now_s:
                arrival = self._coming.pop()
                seq = Sequence(arrival.request, list(arrival.request.prompt_ids))
                self._arrivals[seq] = arrival
                self.scheduler.add(seq)
            step = self.scheduler.schedule(self.now_s)
            self.now_s += self._cost_s(step)
            self.scheduler.commit(step, (), self.now_s)
            for advance in step.advances:
                if advance.end == advance.seq.num_tokens:
                    self._give_token(advance.seq)

    def _cost_s(self, step: Step) -> float:
        num_tokens = sum(advance.num_tokens for advance in step.advances)
        self.num_computed_tokens += num_tokens
        return BASE_S + TOKEN_S * num_tokens + CONTEXT_S * sum(advance.end for advance in step.advances)

    def _give_token(self, seq: Sequence) -> None:
        seq.token_ids.append(0)
        times_s = self._token_times_s.setdefault(seq, [])
        times_s.append(self.now_s - seq.request.arrival_s)
        if seq.num_generated_tokens == self._arrivals[seq].num_new:
            self.scheduler.remove(seq, is_complete=True)
            self.served.append(Served(self._arrivals[seq], tuple(times_s)))


def row(name: str, run: Simulation) -> str:
    cells = []
    for is_long in (False, True):
        some = [served for served in run.served if served.arrival.is_long == is_long]
        for times_s in ([served.first_token_s for served in some], [served.latency_s for served in some]):
            cells.append("{:.1f} / {:.1f}".format(*np.percentile(times_s, [50, 99])))
    urgent_s = [served.latency_s for served in run.served if served.arrival.request.priority < 0]
    cells.append("{:.1f} / {:.1f}".format(*np.percentile(urgent_s, [50, 99])))
    gaps_s = np.concatenate([np.diff(served.token_times_s) for served in run.served])
    cells.append(f"{np.percentile(gaps_s, 99):.2f}")
    cells.append(f"{max(served.first_token_s for served in run.served):.1f}")
    cells.append(f"{np.mean([served.is_in_time for served in run.served]):.1%}")
    num_needed = sum(len(served.arrival.request.prompt_ids) + served.arrival.num_new - 1 for served in run.served)
    cells.append(f"{run.num_computed_tokens / num_needed - 1:.1%}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=1500)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    at_once = Simulation(CONFIG, arrivals(asked.num_requests, 0, asked.seed))
    at_once.run()
    rate = asked.load * asked.num_requests / at_once.now_s
    print(f"{asked.num_requests} requests, {rate:.3f} per second: {asked.load} of what is served at best\n")
    print(
        "| scheduling | short: first token, s (P50 / P99) | short: last | long: first | long: last | urgent: last "
        "| gap P99, s | longest wait, s | in time | recomputed |"
    )
    print("|---|---|---|---|---|---|---:|---:|---:|---:|")
    for name, config in VARIANTS.items():
        run = Simulation(config, arrivals(asked.num_requests, rate, asked.seed))
        run.run()
        print(row(name, run), flush=True)


if __name__ == "__main__":
    main()
