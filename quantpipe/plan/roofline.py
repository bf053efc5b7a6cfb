"""How long steps take: the least that memory and arithmetic allow, and what is to be expected of this runtime.

A step reads weights once and the keys and values of its sequences, and computes two operations per weight and token.
"""

from dataclasses import dataclass

from quantpipe.formats.scheme import WeightScheme
from quantpipe.plan import kv, weights
from quantpipe.plan.devices import Device, Kind
from quantpipe.plan.memory import MAX_BATCHED_TOKENS, Load
from quantpipe.plan.shape import AttentionShape, LinearShape, ModelShape


@dataclass(frozen=True)
class Efficiency:
    """The share of a device's speeds that steps reach. ``is_overlapped``: reading goes on while it computes.

    ``overhead_s`` is what a step takes besides: scheduling, launches.
    """

    memory_frac: float
    compute_frac: float
    overhead_s: float
    is_overlapped: bool
    source: str


EFFICIENCY: dict[Kind, Efficiency] = {
    "cpu": Efficiency(0.85, 0.62, 0.0005, False, "fitted to runs in bench/README.md (servers over HTTP)"),
    "gpu": Efficiency(0.70, 0.50, 0.001, True, "an assumption: no run on a GPU has been measured yet"),
}


@dataclass(frozen=True)
class Step:
    """One step, or several together. ``arithmetic_s`` is at the device's full rates."""

    num_bytes: float
    num_flops: float
    arithmetic_s: float
    num_steps: int = 1

    @property
    def intensity_flops_per_byte(self) -> float:
        return self.num_flops / self.num_bytes

    def bound_s(self, device: Device) -> float:
        """Not even a perfect program is faster."""
        return max(self.num_bytes / device.bandwidth_bytes_per_s, self.arithmetic_s)

    def expected_s(self, device: Device) -> float:
        """At the efficiency of the device's kind."""
        own = EFFICIENCY[device.kind]
        parts_s = (
            self.num_bytes / device.bandwidth_bytes_per_s / own.memory_frac,
            self.arithmetic_s / own.compute_frac,
        )
        return (max(parts_s) if own.is_overlapped else sum(parts_s)) + self.num_steps * own.overhead_s


@dataclass(frozen=True)
class Times:
    """At one load, in seconds. ``ttft_s`` is the median of prompts that come together; alone, ``ttft_alone_s``."""

    ttft_alone_s: float
    ttft_s: float
    tpot_s: float
    output_tok_s: float
    prompt_tok_s: float


def rate(device: Device, scheme: WeightScheme | None) -> float:
    """Operations per second on a linear in that scheme."""
    if scheme is None:
        return device.float_flops_per_s
    return device.weight_only_flops_per_s if scheme.activation_bits is None else device.int8_flops_per_s


def decode_step(shape: ModelShape, device: Device, load: Load, context: int, tokens_each: int = 1) -> Step:
    """One step in which each sequence, of ``context`` tokens, reads ``tokens_each`` new ones: more if it guesses."""
    num_tokens = load.concurrency * tokens_each
    kv_bytes = kv.read_bytes(shape, load.kv_dtype, kv.COMPUTE_BYTES[device.kind], context)
    num_bytes = weights.read_bytes(shape, device.kind, num_tokens) + load.concurrency * kv_bytes
    seen_flops = sum(_flops_per_seen(own) * kv.seen_tokens(context, own.window) for own in shape.attention)
    return _step(shape, device, num_tokens, num_tokens, num_bytes, num_tokens * seen_flops)


def prefill(shape: ModelShape, device: Device, num_prompts: int, prompt_tokens: int) -> Step:
    """All steps that read so many prompts, one budget of tokens after the other."""
    num_tokens = num_prompts * prompt_tokens
    num_steps = -(-num_tokens // MAX_BATCHED_TOKENS)
    per_step = weights.read_bytes(shape, device.kind, min(num_tokens, MAX_BATCHED_TOKENS))
    seen_flops = sum(_flops_per_seen(own) * _seen_in_all(prompt_tokens, own.window) for own in shape.attention)
    return _step(shape, device, num_tokens, num_prompts, num_steps * per_step, num_prompts * seen_flops, num_steps)


def first_half(num_prompts: int, prompt_tokens: int) -> float:
    """How many prompts have been read, as a number, when the median one of those that came together is."""
    median = (num_prompts + 1) // 2
    steps = -(-median * prompt_tokens // MAX_BATCHED_TOKENS)
    return min(num_prompts, steps * MAX_BATCHED_TOKENS / prompt_tokens)


def times_at(shape: ModelShape, device: Device, load: Load) -> Times:
    """Expected at one load; time per token is that at full context."""
    all_prompts_s = prefill(shape, device, load.concurrency, load.prompt_tokens).expected_s(device)
    tpot_s = decode_step(shape, device, load, load.context).expected_s(device)
    num_outputs, num_prompts = load.concurrency * load.output_tokens, load.concurrency
    return Times(
        ttft_alone_s=prefill(shape, device, 1, load.prompt_tokens).expected_s(device),
        ttft_s=all_prompts_s * first_half(num_prompts, load.prompt_tokens) / num_prompts,
        tpot_s=tpot_s,
        output_tok_s=num_outputs / (all_prompts_s + load.output_tokens * tpot_s),
        prompt_tok_s=num_prompts * load.prompt_tokens / all_prompts_s,
    )


def _step(
    shape: ModelShape,
    device: Device,
    num_tokens: int,
    num_logit_rows: int,
    num_bytes: float,
    attention_flops: float,
    num_steps: int = 1,
) -> Step:
    num_flops, arithmetic_s = attention_flops, attention_flops / device.float_flops_per_s
    for linear, rows in (*((each, num_tokens) for each in shape.linears), (shape.lm_head, num_logit_rows)):
        flops = _linear_flops(linear, rows)
        num_flops += flops
        arithmetic_s += flops / rate(device, linear.scheme)
    return Step(num_bytes, num_flops, arithmetic_s, num_steps)


def _linear_flops(linear: LinearShape, num_tokens: int) -> float:
    return 2.0 * linear.num_used_weights * num_tokens


def _flops_per_seen(own: AttentionShape) -> int:
    """A query and a key multiplied, a value weighted: for each token seen, in every head."""
    return 4 * own.num_heads * own.head_dim


def _seen_in_all(num_tokens: int, window: int | None) -> int:
    """How many tokens those of a prompt see, all together."""
    bounded = num_tokens if window is None else min(num_tokens, window)
    return bounded * (bounded + 1) // 2 + (num_tokens - bounded) * bounded
