"""The whole plan of one subject on one device at one load, as data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from quantpipe.errors import RecipeError
from quantpipe.plan.burst import Times, times_at
from quantpipe.plan.devices import Device
from quantpipe.plan.levers import Lever, levers
from quantpipe.plan.memory import MOST_SEQUENCES, UTILIZATION, Load, Memory, contexts_to_show, memory_at
from quantpipe.plan.quantization_run import QuantizationRun, quantization_run
from quantpipe.plan.roofline import EFFICIENCY, Efficiency, StepCosts
from quantpipe.plan.shape import ModelShape
from quantpipe.plan.slo import Slo
from quantpipe.plan.subject import Subject
from quantpipe.plan.weights import SCHEMES, held_bytes, stored_bytes


@dataclass(frozen=True)
class SchemeRow:
    """Bytes of all weights in one scheme, on disk and in the device's memory."""

    scheme: str
    stored_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class FitRow:
    """How many sequences of one context fit, and how fast so many are (at most 256); None where not one fits."""

    context_tokens: int
    kv_bytes_per_sequence: int
    num_fitting: int
    ttft_s: float | None
    tpot_s: float | None
    output_tok_s: float | None
    meets_slo: bool | None


@dataclass(frozen=True)
class Recommendation:
    """Settings to start with. ``max_num_seqs`` 0: not one sequence of that context fits, or meets what is asked."""

    max_num_seqs: int
    gpu_memory_utilization_frac: float
    max_model_len: int
    reason: str


@dataclass(frozen=True)
class Roofline:
    """Lower bounds and expected times: of reading one prompt alone, of a step that decodes, and of the whole load."""

    balance_flops_per_byte: float
    prefill_flops_per_byte: float
    decode_flops_per_byte: float
    ttft_bound_s: float
    ttft_alone_s: float
    step_bound_s: float
    step_s: float
    expected: Times
    efficiency: Efficiency


@dataclass(frozen=True)
class Plan:
    """``schemes`` are of the base model; everything else of what is served."""

    shape: ModelShape
    device: Device
    load: Load
    slo: Slo
    memory: Memory
    schemes: tuple[SchemeRow, ...]
    fits: tuple[FitRow, ...]
    roofline: Roofline
    levers: tuple[Lever, ...]
    recommendation: Recommendation
    quantization_run: QuantizationRun | None
    notes: tuple[str, ...]


def make_plan(subject: Subject, device: Device, load: Load, slo: Slo) -> Plan:
    """RecipeError where the context exceeds what the model knows."""
    shape = subject.shape
    if shape.max_positions and load.context > shape.max_positions:
        limit = shape.max_positions
        raise RecipeError(f"--context: {load.context:,} exceeds the model's own limit of {limit:,} tokens; lower it")
    run = None
    if subject.recipe is not None and subject.recipe.quantize is not None:
        run = quantization_run(subject.base, shape, subject.recipe)
        # Gate power: how many items each limit of subject.recipe.gate needs belongs here, as a field of Plan, once
        # quantpipe.gate has the function for it.
    return Plan(
        shape=shape,
        device=device,
        load=load,
        slo=slo,
        memory=memory_at(shape, device, load),
        schemes=tuple(_scheme_rows(subject, device)),
        fits=tuple(_fit_row(shape, device, load, slo, context) for context in contexts_to_show(shape, load.context)),
        roofline=_roofline(shape, device, load),
        levers=levers(shape, device, load),
        recommendation=_recommendation(shape, device, load, slo),
        quantization_run=run,
        notes=shape.notes,
    )


def _scheme_rows(subject: Subject, device: Device) -> Sequence[SchemeRow]:
    rows = []
    for label, scheme in SCHEMES.items():
        try:
            shape = subject.base.in_scheme(scheme)
        except RecipeError:
            continue  # its groups do not divide this model's linears
        own_label = label if scheme is not None else shape.float_label
        rows.append(SchemeRow(own_label, stored_bytes(shape), held_bytes(shape, device.kind)))
    if subject.shape.scheme_label not in {row.scheme for row in rows}:
        own = subject.shape
        rows.append(SchemeRow(own.scheme_label, stored_bytes(own), held_bytes(own, device.kind)))
    return rows


def _fit_row(shape: ModelShape, device: Device, load: Load, slo: Slo, context: int) -> FitRow:
    memory = memory_at(shape, device, replace(load, context=context))
    if memory.num_fitting == 0:
        return FitRow(context, memory.kv_bytes_per_sequence, 0, None, None, None, None)
    number = min(memory.num_fitting, MOST_SEQUENCES)
    times = times_at(shape, device, replace(load, context=context, concurrency=number))
    meets = slo.is_met(times) if slo.is_asked else None
    sizes = (memory.kv_bytes_per_sequence, memory.num_fitting)
    return FitRow(context, *sizes, times.ttft_s, times.tpot_s, times.output_tok_s, meets)


def _roofline(shape: ModelShape, device: Device, load: Load) -> Roofline:
    alone = replace(load, concurrency=1, given_output_tokens=1, context=load.prompt_tokens + 1)
    one = StepCosts.of(shape, device, load.kv_dtype, 1, load.prompt_tokens, load.context)
    prompt = one.step(load.prompt_tokens, 0, 1)
    costs = StepCosts.of(shape, device, load.kv_dtype, load.concurrency, load.prompt_tokens, load.context)
    step = costs.step(0, load.concurrency, load.concurrency)
    return Roofline(
        balance_flops_per_byte=device.balance_flops_per_byte,
        prefill_flops_per_byte=prompt.intensity_flops_per_byte,
        decode_flops_per_byte=step.intensity_flops_per_byte,
        ttft_bound_s=prompt.bound_s(device),
        ttft_alone_s=times_at(shape, device, alone).ttft_s,
        step_bound_s=step.bound_s(device),
        step_s=step.expected_s(device),
        expected=times_at(shape, device, load),
        efficiency=EFFICIENCY[device.kind],
    )


def _recommendation(shape: ModelShape, device: Device, load: Load, slo: Slo) -> Recommendation:
    """As many sequences as fit and as are asked to be fast enough; larger batches only pay while they fit."""
    num_fitting = memory_at(shape, device, load).num_fitting
    if num_fitting == 0:
        return Recommendation(0, UTILIZATION, load.context, "not one sequence of this context fits beside the weights")
    most = min(num_fitting, MOST_SEQUENCES)
    reason = f"{num_fitting:,} fit" + (f"; more than {most} are seldom worth it" if most < num_fitting else "")
    if not slo.is_asked:
        return Recommendation(most, UTILIZATION, load.context, reason)
    meeting = list(
        takewhile(lambda n: slo.is_met(times_at(shape, device, replace(load, concurrency=n))), _numbers(most))
    )
    if not meeting:
        return Recommendation(0, UTILIZATION, load.context, "not even one at a time is as fast as asked")
    return Recommendation(max(meeting), UTILIZATION, load.context, f"{reason}; the most that are as fast as asked")


def _numbers(most: int) -> Sequence[int]:
    """Batch sizes that are tried: 1 to 16, then in steps of a quarter of a power of two."""
    steps = [size for size in range(1, most + 1) if size <= 16 or size % (1 << max(0, size.bit_length() - 3)) == 0]
    return [*steps, most]
