"""What could be changed, each in numbers at the same load, what pays most first."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quantpipe.errors import RecipeError
from quantpipe.formats.scheme import w4a16
from quantpipe.plan.burst import times_at
from quantpipe.plan.devices import Device
from quantpipe.plan.memory import MOST_SEQUENCES, Load, memory_at
from quantpipe.plan.roofline import StepCosts
from quantpipe.plan.shape import ModelShape

BATCH_FACTOR = 4
# Assumed, and said beside the figures: guesses that hold, and how much of a prompt is known from earlier ones.
NUM_GUESSES, ACCEPTED_FRAC = 4, 0.5
SHARED_PROMPT_FRAC = 0.5
INT8_KV = "int8_per_token_head"
INT4_BITS = 4


@dataclass(frozen=True)
class Lever:
    """One change. ``gain_ratio`` is output tokens per second over those without it; 1 and a reason where none is."""

    name: str
    assumption: str
    gain_ratio: float
    output_tok_s: float
    ttft_s: float
    tpot_s: float
    memory_bytes: int
    num_fitting: int


def levers(shape: ModelShape, device: Device, load: Load) -> tuple[Lever, ...]:
    """Sorted by gain."""
    make: tuple[Callable[[ModelShape, Device, Load], Lever], ...] = (_weights, _kv, _batch, _speculation, _prefixes)
    found = [each(shape, device, load) for each in make]
    return tuple(sorted(found, key=lambda lever: -lever.gain_ratio))


def _weights(shape: ModelShape, device: Device, load: Load) -> Lever:
    name = "weights in 4 bits"
    if all(each.scheme is not None and each.scheme.bits <= INT4_BITS for each in shape.linears):
        return _measured(name, "they are already", shape, device, load, load, shape)
    try:
        changed = shape.in_scheme(w4a16(64))
    except RecipeError:
        changed = None
    if changed is None:
        return _measured(name, "groups of 64 do not divide every linear", shape, device, load, load, shape)
    return _measured(name, "w4a16 g64, lm_head as it is", shape, device, load, load, changed)


def _kv(shape: ModelShape, device: Device, load: Load) -> Lever:
    if load.kv_dtype != "auto":
        return _measured("keys and values in int8", f"they are {load.kv_dtype}", shape, device, load, load, shape)
    changed = replace(load, kv_dtype=INT8_KV)
    return _measured("keys and values in int8", INT8_KV, shape, device, load, changed, shape)


def _batch(shape: ModelShape, device: Device, load: Load) -> Lever:
    num_fitting = memory_at(shape, device, load).num_fitting
    number = min(BATCH_FACTOR * load.concurrency, num_fitting, MOST_SEQUENCES)
    if number <= load.concurrency:
        return _measured("larger batch", "no room for more", shape, device, load, load, shape)
    changed = replace(load, concurrency=number)
    return _measured("larger batch", f"{number} at once, if so many come", shape, device, load, changed, shape)


def _speculation(shape: ModelShape, device: Device, load: Load) -> Lever:
    """A step checks all guesses; what holds on average is the sum of the chances that the first 1, 2 ... do."""
    gained = sum(ACCEPTED_FRAC**number for number in range(NUM_GUESSES + 1))
    num, tokens_each = load.concurrency, 1 + NUM_GUESSES
    costs = StepCosts.of(shape, device, load.kv_dtype, num, load.prompt_tokens, load.context)
    plain_s = costs.step(0, num, num).expected_s(device)
    ratio = costs.step(0, num, num * tokens_each, tokens_each).expected_s(device) / gained / plain_s
    before, memory = times_at(shape, device, load), memory_at(shape, device, load)
    whole_s = num * load.output_tokens / before.output_tok_s
    saved_s = load.output_tokens * plain_s * (1 - ratio)
    output_tok_s = num * load.output_tokens / (whole_s - saved_s)
    tpot_s = before.tpot_s - plain_s * (1 - ratio)
    assumption = f"{NUM_GUESSES} guesses, {ACCEPTED_FRAC:.0%} of them hold: {gained:.2f} tokens a step"
    figures = (output_tok_s / before.output_tok_s, output_tok_s, before.ttft_s, tpot_s)
    return Lever("speculation", assumption, *figures, memory.total_bytes, memory.num_fitting)


def _prefixes(shape: ModelShape, device: Device, load: Load) -> Lever:
    """What is known is not read again; it stays in memory all the same."""
    known = round(SHARED_PROMPT_FRAC * load.prompt_tokens)
    read = replace(load, context=load.context - known, given_output_tokens=load.output_tokens)
    before, after = times_at(shape, device, load), times_at(shape, device, read)
    memory = memory_at(shape, device, load)
    figures = (after.output_tok_s / before.output_tok_s, after.output_tok_s, after.ttft_s, after.tpot_s)
    assumption = f"{SHARED_PROMPT_FRAC:.0%} of each prompt known"
    return Lever("prefix cache", assumption, *figures, memory.total_bytes, memory.num_fitting)


def _measured(
    name: str, assumption: str, shape: ModelShape, device: Device, load: Load, new_load: Load, new_shape: ModelShape
) -> Lever:
    """Of what changes the model or the load."""
    before, after = times_at(shape, device, load), times_at(new_shape, device, new_load)
    memory = memory_at(new_shape, device, new_load)
    gain = after.output_tok_s / before.output_tok_s
    sizes = (memory.total_bytes, memory.num_fitting)
    return Lever(name, assumption, gain, after.output_tok_s, after.ttft_s, after.tpot_s, *sizes)
