"""The real scheduler on a simulated clock: no model is run. What the scheduling benches have in common.

A step is taken to last ``BASE_S + TOKEN_S * tokens computed + CONTEXT_S * tokens of context read``, which is about what
a small model takes on a CPU. Outputs end by themselves: the scheduler sees only ``max_tokens``.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quantpipe.engine.block_pool import BlockPool
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.prefix_cache import PrefixCache
from quantpipe.engine.request import Request, Sequence
from quantpipe.engine.scheduler import Scheduler
from quantpipe.engine.step import Step

BASE_S, TOKEN_S, CONTEXT_S = 5e-3, 4e-4, 1e-7


@dataclass(frozen=True)
class Arrival:
    """A request, and how long its output turns out to be."""

    request: Request
    num_new: int


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


# Called with each step and its seconds, before its tokens are there.
Watcher = Callable[[Scheduler, Step, float], None]


class Simulation:
    """One engine without a model, and the times at which its requests, in order of arrival, got their tokens."""

    def __init__(self, config: EngineConfig, num_blocks: int, coming: list[Arrival], watch: Watcher | None = None):
        pool = BlockPool(num_blocks)
        prefix_cache = PrefixCache(pool, config.block_size) if config.prefix_cache else None
        self.scheduler = Scheduler(pool, config, 1, prefix_cache)
        self.num_computed_tokens = 0
        self.now_s = 0.0
        self.served: list[Served] = []
        self._watch = watch
        self._coming = coming[::-1]
        self._arrivals: dict[Sequence, Arrival] = {}
        self._token_times_s: dict[Sequence, list[float]] = {}

    @property
    def num_needed_tokens(self) -> int:
        """What the served requests would have taken without preemption."""
        return sum(len(served.arrival.request.prompt_ids) + served.arrival.num_new - 1 for served in self.served)

    def run(self) -> None:
        while self._coming or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished:
                self.now_s = max(self.now_s, self._coming[-1].request.arrival_s)
            while self._coming and self._coming[-1].request.arrival_s <= self.now_s:
                arrival = self._coming.pop()
                seq = Sequence(arrival.request, list(arrival.request.prompt_ids))
                self._arrivals[seq] = arrival
                self.scheduler.add(seq)
            self._step()

    def _step(self) -> None:
        step = self.scheduler.schedule(self.now_s)
        num_tokens = sum(advance.num_tokens for advance in step.advances)
        step_s = BASE_S + TOKEN_S * num_tokens + CONTEXT_S * sum(advance.end for advance in step.advances)
        self.num_computed_tokens += num_tokens
        if self._watch is not None:
            self._watch(self.scheduler, step, step_s)
        self.now_s += step_s
        self.scheduler.commit(step, (), self.now_s)
        for advance in step.advances:
            if advance.end == advance.seq.num_tokens:
                self._give_token(advance.seq)

    def _give_token(self, seq: Sequence) -> None:
        seq.token_ids.append(0)
        times_s = self._token_times_s.setdefault(seq, [])
        times_s.append(self.now_s - seq.request.arrival_s)
        if seq.num_generated_tokens == self._arrivals[seq].num_new:
            self.scheduler.remove(seq, is_complete=True)
            self.served.append(Served(self._arrivals[seq], tuple(times_s)))
