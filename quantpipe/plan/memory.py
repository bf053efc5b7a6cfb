"""What serving takes beside weights, and how many sequences fit. The formulas are those of docs/planning.md."""

from dataclasses import dataclass

from quantpipe.plan import kv
from quantpipe.plan.devices import Device, Kind
from quantpipe.plan.shape import ModelShape
from quantpipe.plan.weights import held_bytes

UTILIZATION = 0.85  # to start with
MAX_BATCHED_TOKENS = 512  # the engine's default budget of a step
MOST_SEQUENCES = 256
# The process around the model. On a CPU measured: an engine's process with torch, without what serves over HTTP
# (bench/README.md, "Results: the planner"). On a GPU assumed: the driver's context and its libraries.
PROCESS_BYTES: dict[Kind, int] = {"cpu": 290_000_000, "gpu": 600_000_000}


@dataclass(frozen=True)
class Load:
    """What is asked of a server: so many sequences at once, each of ``context`` tokens, prompt and output.

    ``given_output_tokens`` None takes a quarter of the context.
    """

    concurrency: int
    context: int
    kv_dtype: str = "auto"
    given_output_tokens: int | None = None

    @property
    def output_tokens(self) -> int:
        return max(1, self.context // 4) if self.given_output_tokens is None else self.given_output_tokens

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context - self.output_tokens)


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose at one load. ``num_fitting`` sequences of that context fit within ``utilization_frac``."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    kv_bytes: int
    activation_bytes: int
    process_bytes: int
    total_bytes: int
    utilization_frac: float
    usable_bytes: int
    num_fitting: int

    @property
    def is_fitting(self) -> bool:
        return self.total_bytes <= self.usable_bytes


def activation_bytes(shape: ModelShape, kind: Kind, num_seqs: int) -> int:
    """Of the largest step: T tokens through one layer, and the logits of every sequence in float32.

    T * b * (3 H + 2 Q + 2 KV + 3 I) + 4 * S * V with b bytes per number.
    """
    widest = max(own.num_heads * own.head_dim for own in shape.attention)
    kv_size = max(own.num_kv_heads * own.head_dim for own in shape.attention)
    per_token = 3 * shape.hidden_size + 2 * widest + 2 * kv_size + 3 * shape.intermediate_size
    num_tokens = max(MAX_BATCHED_TOKENS, num_seqs)
    return num_tokens * kv.COMPUTE_BYTES[kind] * per_token + 4 * num_seqs * shape.vocab_size


def memory_at(shape: ModelShape, device: Device, load: Load) -> Memory:
    """At one load. Where weights alone do not fit, ``num_fitting`` is 0."""
    kind = device.kind
    compute_bytes = kv.COMPUTE_BYTES[kind]
    sequence = kv.sequence_bytes(shape, load.kv_dtype, compute_bytes, load.context, MAX_BATCHED_TOKENS)
    weights, process = held_bytes(shape, kind), PROCESS_BYTES[kind]
    activations = activation_bytes(shape, kind, load.concurrency)
    usable = int(UTILIZATION * device.memory_bytes)
    return Memory(
        weight_bytes=weights,
        kv_bytes_per_token=kv.token_bytes(shape, load.kv_dtype, compute_bytes),
        kv_bytes_per_sequence=sequence,
        kv_bytes=load.concurrency * sequence,
        activation_bytes=activations,
        process_bytes=process,
        total_bytes=weights + load.concurrency * sequence + activations + process,
        utilization_frac=UTILIZATION,
        usable_bytes=usable,
        num_fitting=_num_fitting(shape, kind, sequence, usable - weights - process),
    )


def _num_fitting(shape: ModelShape, kind: Kind, sequence_bytes: int, room_bytes: int) -> int:
    """Each further sequence brings a row of logits, and beyond the step's budget a token of activations."""
    low, high = 0, max(0, room_bytes) // sequence_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if middle * sequence_bytes + activation_bytes(shape, kind, middle) <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def contexts_to_show(shape: ModelShape, context: int) -> list[int]:
    """Powers of 4 from 512 on up to the model's own limit, and the one that was asked for."""
    limit = shape.max_positions or context
    powers = [512 * 4**exponent for exponent in range(8)]
    return sorted({context, *(power for power in powers if power <= limit)})
