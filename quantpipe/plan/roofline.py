"""How long steps take: the least that memory and arithmetic allow, and what is to be expected of this runtime.

A step reads weights once and the keys and values of its sequences, and computes two operations per weight and token.
"""

from dataclasses import dataclass

from quantpipe.formats.scheme import WeightScheme
from quantpipe.plan import kv, weights
from quantpipe.plan.devices import Device, Kind
from quantpipe.plan.memory import MAX_BATCHED_TOKENS
from quantpipe.plan.shape import AttentionShape, ModelShape


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
    "cpu": Efficiency(0.85, 0.80, 0.0002, False, "fitted to one machine (docs/planning.md)"),
    "gpu": Efficiency(0.70, 0.50, 0.001, True, "an assumption: no run on a GPU has been measured yet"),
}


@dataclass(frozen=True)
class Work:
    """Arithmetic: operations, and how long they take at the device's full rates."""

    num_flops: float = 0.0
    arithmetic_s: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_flops + other.num_flops, self.arithmetic_s + other.arithmetic_s)

    def times(self, number: float) -> "Work":
        """So often."""
        return Work(number * self.num_flops, number * self.arithmetic_s)


@dataclass(frozen=True)
class Step:
    """One step of the engine."""

    num_bytes: float
    work: Work

    @property
    def intensity_flops_per_byte(self) -> float:
        return self.work.num_flops / self.num_bytes

    def bound_s(self, device: Device) -> float:
        """Not even a perfect program is faster."""
        return max(self.num_bytes / device.bandwidth_bytes_per_s, self.work.arithmetic_s)

    def expected_s(self, device: Device) -> float:
        """At the efficiency of the device's kind."""
        own = EFFICIENCY[device.kind]
        reading_s = self.num_bytes / device.bandwidth_bytes_per_s / own.memory_frac
        computing_s = self.work.arithmetic_s / own.compute_frac
        return own.overhead_s + (max(reading_s, computing_s) if own.is_overlapped else reading_s + computing_s)


@dataclass(frozen=True)
class StepCosts:
    """What steps of one model cost at one load: by tokens of prompts, by sequences that decode, by logits wanted.

    A prompt's attention is spread evenly over its tokens. ``prompt_weight_bytes`` and ``decode_weight_bytes`` differ
    for mixtures of experts alone, of which few tokens read but some.
    """

    device: Device
    prompt_weight_bytes: float
    decode_weight_bytes: float
    kv_bytes_each: float
    linears: Work
    head: Work
    prompt_attention: Work
    decode_attention: Work

    @classmethod
    def of(
        cls, shape: ModelShape, device: Device, kv_dtype: str, num_seqs: int, prompt_tokens: int, context: int
    ) -> "StepCosts":
        """``context`` is what a sequence that decodes looks back on."""
        chunk = min(MAX_BATCHED_TOKENS, num_seqs * prompt_tokens)
        seen_in_prompt = (_seen_in_all(prompt_tokens, own.window) / prompt_tokens for own in shape.attention)
        seen_decoding = (kv.seen_tokens(context, own.window) for own in shape.attention)
        parts = [(linear.num_used_weights, rate(device, linear.scheme)) for linear in shape.linears]
        return cls(
            device=device,
            prompt_weight_bytes=weights.read_bytes(shape, device.kind, chunk),
            decode_weight_bytes=weights.read_bytes(shape, device.kind, num_seqs),
            kv_bytes_each=kv.read_bytes(shape, kv_dtype, kv.COMPUTE_BYTES[device.kind], context),
            linears=Work(sum(2.0 * num for num, _ in parts), sum(2.0 * num / speed for num, speed in parts)),
            head=_work(2.0 * shape.lm_head.num_weights, rate(device, shape.lm_head.scheme)),
            prompt_attention=_attention(shape, device, list(seen_in_prompt)),
            decode_attention=_attention(shape, device, list(seen_decoding)),
        )

    def step(self, prompt_tokens: int, num_decoding: int, num_logit_rows: int, tokens_each: int = 1) -> Step:
        """``num_decoding`` sequences read ``tokens_each`` new tokens each: more than one if they guess."""
        num_read = num_decoding * tokens_each
        work = self.linears.times(prompt_tokens + num_read) + self.head.times(num_logit_rows)
        work += self.prompt_attention.times(prompt_tokens) + self.decode_attention.times(num_read)
        num_bytes = self.prompt_weight_bytes if prompt_tokens else self.decode_weight_bytes
        return Step(num_bytes + num_decoding * self.kv_bytes_each, work)


def rate(device: Device, scheme: WeightScheme | None) -> float:
    """Operations per second on a linear in that scheme."""
    if scheme is None:
        return device.float_flops_per_s
    return device.weight_only_flops_per_s if scheme.activation_bits is None else device.int8_flops_per_s


def _work(num_flops: float, speed: float) -> Work:
    return Work(num_flops, num_flops / speed)


def _attention(shape: ModelShape, device: Device, num_seen: list[float]) -> Work:
    """Of one token that sees so many in each layer."""
    flops = sum(_flops_per_seen(own) * seen for own, seen in zip(shape.attention, num_seen, strict=True))
    return _work(flops, device.float_flops_per_s)


def _flops_per_seen(own: AttentionShape) -> int:
    """A query and a key multiplied, a value weighted: for each token seen, in every head."""
    return 4 * own.num_heads * own.head_dim


def _seen_in_all(num_tokens: int, window: int | None) -> int:
    """How many tokens those of a prompt see, all together."""
    bounded = num_tokens if window is None else min(num_tokens, window)
    return bounded * (bounded + 1) // 2 + (num_tokens - bounded) * bounded
