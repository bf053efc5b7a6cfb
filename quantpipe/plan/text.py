"""A plan for people: short tables, every figure with its unit."""

from collections.abc import Iterable, Sequence

from quantpipe.plan.levers import Lever
from quantpipe.plan.memory import MAX_BATCHED_TOKENS
from quantpipe.plan.plan import FitRow, Plan
from quantpipe.plan.quantization_run import QuantizationRun

GB = 1e9


def render(plan: Plan) -> str:
    """Several tables below each other, notes last."""
    parts = [_heading(plan), _memory(plan), _schemes(plan), _fits(plan), _roofline(plan), _levers(plan.levers)]
    parts.append(_recommendation(plan))
    if plan.quantization_run is not None:
        parts.append(_quantization(plan.quantization_run))
    parts += [f"note: {note}" for note in plan.notes]
    return "\n\n".join(parts) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as they must be: the first to the left, the others to the right."""
    lines = [tuple(headings), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def size(num_bytes: float) -> str:
    """In gigabytes; small ones in megabytes."""
    return f"{num_bytes / GB:,.2f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:,.1f} MB"


def ms(seconds: float | None) -> str:
    """In milliseconds."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.2f}"


def _heading(plan: Plan) -> str:
    shape, device, load = plan.shape, plan.device, plan.load
    served = "" if shape.is_served else ", not served by the bundled runtime"
    heads = f"{shape.attention[0].num_kv_heads} KV heads of {shape.attention[0].head_dim}"
    speed = f"{device.bandwidth_bytes_per_s / GB:,.4g} GB/s"
    rates = f"{device.float_flops_per_s / 1e12:,.3g} / {device.int8_flops_per_s / 1e12:,.3g} TFLOP/s float / int8"
    return "\n".join(
        (
            f"{shape.where}",
            f"model   {shape.family}{served}: {shape.num_weights / 1e6:,.0f}M weights in {shape.scheme_label}, "
            f"{len(shape.attention)} layers, {heads}",
            f"device  {device.name}: {size(device.memory_bytes)}, {speed}, {rates} ({device.source})",
            f"load    {load.concurrency:,} sequences of {load.context:,} tokens ({load.prompt_tokens:,} of prompt, "
            f"{load.output_tokens:,} of output), KV cache {load.kv_dtype}",
        )
    )


def _memory(plan: Plan) -> str:
    own = plan.memory
    rows = [
        ("weights", size(own.weight_bytes)),
        (f"keys and values ({own.kv_bytes_per_token / 1024:,.1f} KiB per token)", size(own.kv_bytes)),
        (f"activations of a step of {MAX_BATCHED_TOKENS} tokens", size(own.activation_bytes)),
        ("process and libraries", size(own.process_bytes)),
        ("together", size(own.total_bytes)),
        (f"usable ({own.utilization_frac:.0%} of the device)", size(own.usable_bytes)),
    ]
    return table(("memory", ""), rows) + ("" if own.is_fitting else "\nIT DOES NOT FIT")


def _schemes(plan: Plan) -> str:
    rows = ((row.scheme, size(row.stored_bytes), size(row.held_bytes)) for row in plan.schemes)
    return table(("weights by scheme", "on disk", "in memory"), rows)


def _fits(plan: Plan) -> str:
    headings: tuple[str, ...] = ("context, tokens", "KV per sequence", "fit", "TTFT, ms", "TPOT, ms", "output tok/s")
    headings = (*headings, "as fast as asked") if plan.slo.is_asked else headings
    return "what fits, and how fast so many are (256 at most)\n" + table(headings, map(_fit_cells, plan.fits))


def _fit_cells(row: FitRow) -> tuple[str, ...]:
    speed = "-" if row.output_tok_s is None else f"{row.output_tok_s:,.1f}"
    sizes = (f"{row.context_tokens:,}", size(row.kv_bytes_per_sequence), f"{row.num_fitting:,}")
    cells = (*sizes, ms(row.ttft_s), ms(row.tpot_s), speed)
    return cells if row.meets_slo is None else (*cells, "yes" if row.meets_slo else "no")


def _roofline(plan: Plan) -> str:
    own, times = plan.roofline, plan.roofline.expected
    rows = [
        ("one prompt alone", f"{own.prefill_flops_per_byte:,.1f}", ms(own.ttft_bound_s), ms(own.ttft_alone_s)),
        ("one step, at full context", f"{own.decode_flops_per_byte:,.1f}", ms(own.step_bound_s), ms(own.step_s)),
    ]
    efficiency = own.efficiency
    return "\n".join(
        (
            f"time (balance point {own.balance_flops_per_byte:,.0f} operations per byte)",
            table(("", "operations per byte", "at least, ms", "expected, ms"), rows),
            f"all at once: TTFT {ms(times.ttft_s)} ms, TPOT {ms(times.tpot_s)} ms (medians; a token waits for "
            f"the prompts that are read beside it), {times.output_tok_s:,.1f} output tok/s",
            f"expected at {efficiency.memory_frac:.0%} of the bandwidth and {efficiency.compute_frac:.0%} of the "
            f"arithmetic: {efficiency.source}",
        )
    )


def _levers(found: Sequence[Lever]) -> str:
    rows = (
        (
            f"{own.name} ({own.assumption})",
            f"x {own.gain_ratio:.2f}",
            f"{own.output_tok_s:,.1f}",
            ms(own.ttft_s),
            ms(own.tpot_s),
            size(own.memory_bytes),
            f"{own.num_fitting:,}",
        )
        for own in found
    )
    headings = ("what pays most", "gain", "output tok/s", "TTFT, ms", "TPOT, ms", "memory", "fit")
    return table(headings, rows)


def _recommendation(plan: Plan) -> str:
    own = plan.recommendation
    return (
        f"to start with: max_num_seqs {own.max_num_seqs}, max_model_len {own.max_model_len}, memory_utilization "
        f"{own.gpu_memory_utilization_frac} (elsewhere gpu_memory_utilization): {own.reason}"
    )


def _quantization(run: QuantizationRun) -> str:
    rows = [
        ("processor time, a factor of two either way", f"{run.processor_time_s / 60:,.1f} min"),
        ("peak memory", size(run.peak_memory_bytes)),
        ("disk while it runs", size(run.disk_bytes)),
        ("artifact", size(run.artifact_bytes)),
    ]
    return table(("quantizing, on a CPU", ""), rows)
