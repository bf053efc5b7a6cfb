"""What a step costs in the scheduler, block pool and prefix cache: no model, pure Python, processor time of one thread.

    python bench/scheduler_cost.py --num-seqs 256 1024 --context-tokens 128 1024 4096

For each number of running sequences and context length: the median and 99th percentile of schedule + commit in a step
in which all decode (blocks fill up and are registered as they do); the same while others wait that do not fit; and
a step in which a tenth of them ends, and others start to be read in chunks: 8,192 prompt tokens per step.
"""

import argparse
import random
import time
from collections.abc import Callable

import numpy as np

from quantpipe.engine.admission import ADMISSIONS
from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.policies import POLICIES
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import Request, SamplingParams, Sequence
from quantpipe.engine.scheduler import Scheduler

MAX_TOKENS = 8192  # nobody ends by itself


def sequence(context_tokens: int, rng: random.Random) -> Sequence:
    prompt_ids = tuple(rng.randrange(50_000) for _ in range(context_tokens))
    return Sequence(Request("r", prompt_ids, SamplingParams(max_tokens=MAX_TOKENS)), list(prompt_ids))


class Load:
    """A scheduler with ``num_seqs`` sequences that decode, each at a point of its own within a block.

    The pool holds no more than these, as long as they may become: whoever waits is looked at in every step, in vain.
    """

    def __init__(self, num_seqs: int, context_tokens: int, asked: argparse.Namespace) -> None:
        self.rng = random.Random(0)
        self.context_tokens = context_tokens
        pool = BlockPool(num_seqs * -(-(context_tokens + 16 + MAX_TOKENS) // 16))
        config = EngineConfig(
            policy=asked.policy, admission=asked.admission, max_num_seqs=2 * num_seqs, max_num_batched_tokens=8192
        )
        self.scheduler = Scheduler(pool, config, 1, None if asked.no_prefix_cache else PrefixCache(pool, 16))
        for number in range(num_seqs):
            self.scheduler.add(sequence(context_tokens + number % 16, self.rng))
        while self.scheduler.waiting or any(seq.num_uncomputed_tokens > 1 for seq in self.scheduler.running):
            self.step()

    def step(self) -> float:
        """Seconds of one step; the model's part, a token for each sequence, is not counted."""
        started_s = time.thread_time()
        step = self.scheduler.schedule(0.0)
        scheduled_s = time.thread_time()
        sampling = [advance.seq for advance in step.advances if advance.has_sample]
        computed_s = time.thread_time()
        self.scheduler.commit(step, (), 0.01)
        committed_s = time.thread_time()
        for seq in sampling:
            seq.token_ids.append(self.rng.randrange(50_000))
        return scheduled_s - started_s + committed_s - computed_s

    def wait_in_line(self, num_waiting: int) -> None:
        for _ in range(num_waiting):
            self.scheduler.add(sequence(self.context_tokens, self.rng))

    def replace_a_tenth(self) -> float:
        """Seconds of a step before which a tenth of the sequences ended, and others wait for their places."""
        leaving = list(self.scheduler.running)[::10]
        self.wait_in_line(len(leaving))
        started_s = time.thread_time()
        for seq in leaving:
            self.scheduler.remove(seq)
        return time.thread_time() - started_s + self.step()


def milliseconds(step: Callable[[], float], num_steps: int) -> str:
    times_ms = [1e3 * step() for _ in range(num_steps)]
    return f"{np.percentile(times_ms, 50):.3f} (p99 {np.percentile(times_ms, 99):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--context-tokens", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--policy", choices=POLICIES, default="fcfs")
    parser.add_argument("--admission", choices=ADMISSIONS, default="peak")
    parser.add_argument("--no-prefix-cache", action="store_true")
    asked = parser.parse_args()
    print("| running | context tokens | all decode, ms | while others wait, ms | a tenth replaced, ms |")
    print("|---:|---:|---|---|---|")
    for num_seqs in asked.num_seqs:
        for context_tokens in asked.context_tokens:
            load = Load(num_seqs, context_tokens, asked)
            decoding = milliseconds(load.step, asked.steps)
            load.wait_in_line(num_seqs // 4)
            waiting = milliseconds(load.step, asked.steps)
            replacing = milliseconds(load.replace_a_tenth, 5)
            print(f"| {num_seqs} | {context_tokens} | {decoding} | {waiting} | {replacing} |", flush=True)


if __name__ == "__main__":
    main()
