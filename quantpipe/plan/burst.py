"""Requests that come together, played through step by step on the costs of steps: what each waits for its tokens.

Prompts are read one after the other, out of the budget that sequences which decode leave, as the engine does it.
"""

from dataclasses import dataclass, field
from statistics import median

from quantpipe.plan.devices import Device
from quantpipe.plan.memory import MAX_BATCHED_TOKENS, Load
from quantpipe.plan.roofline import StepCosts
from quantpipe.plan.shape import ModelShape


@dataclass(frozen=True)
class Times:
    """Medians over the requests, in seconds, and tokens per second from the first step to the last."""

    ttft_s: float
    tpot_s: float
    output_tok_s: float


@dataclass
class _Burst:
    """Requests in the order of their prompts: when each had its first token and its last."""

    costs: StepCosts
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    now_s: float = 0.0
    num_steps: int = 0
    num_read: int = 0  # tokens of prompts
    first_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the number of the step that brings the last token

    def play(self) -> None:
        """To the end. Where all prompts are read, steps are alike until the next request ends, and taken at once."""
        while len(self.last_s) < self.num_requests:
            is_read = self.num_read == self.num_requests * self.prompt_tokens
            self._step(self.ends[len(self.last_s)] - self.num_steps if is_read else 1)

    def _step(self, number: int) -> None:
        """So many steps alike."""
        num_decoding = len(self.first_s) - len(self.last_s)
        left = self.num_requests * self.prompt_tokens - self.num_read
        prompt_tokens = min(max(0, MAX_BATCHED_TOKENS - num_decoding), left)
        self.num_read += prompt_tokens
        num_first = self.num_read // self.prompt_tokens - len(self.first_s)
        step = self.costs.step(prompt_tokens, num_decoding, num_decoding + num_first)
        self.now_s += number * step.expected_s(self.costs.device)
        self.num_steps += number
        self.first_s += [self.now_s] * num_first
        self.ends += [self.num_steps + self.output_tokens - 1] * num_first
        while len(self.last_s) < len(self.ends) and self.ends[len(self.last_s)] <= self.num_steps:
            self.last_s.append(self.now_s)


def play_burst(costs: StepCosts, num_requests: int, prompt_tokens: int, output_tokens: int) -> Times:
    """Of ``num_requests`` alike, each with ``output_tokens`` (2 or more count for the time between tokens)."""
    burst = _Burst(costs, num_requests, prompt_tokens, output_tokens)
    burst.play()
    pairs = zip(burst.first_s, burst.last_s, strict=True)
    tpots_s = [(last_s - first_s) / max(1, output_tokens - 1) for first_s, last_s in pairs]
    return Times(median(burst.first_s), median(tpots_s), num_requests * output_tokens / burst.now_s)


def times_at(shape: ModelShape, device: Device, load: Load) -> Times:
    """Expected at one load, all requests at once; a sequence looks back on what it does halfway through its output."""
    halfway = load.prompt_tokens + load.output_tokens // 2
    costs = StepCosts.of(shape, device, load.kv_dtype, load.concurrency, load.prompt_tokens, halfway)
    return play_burst(costs, load.concurrency, load.prompt_tokens, load.output_tokens)
