"""What quantizing takes: a formula with constants from measured runs (bench/README.md, "Results: quantization").

Its two rows of GPTQ, on models of 135M and 494M parameters, are met within 10 % at 44 GFLOP/s for both; other methods
go by their ratio to GPTQ on the smaller one, and its rows are met within a factor of 1.5. On another machine expect a
factor of two either way.
"""

from dataclasses import dataclass

from quantpipe.plan.shape import ModelShape
from quantpipe.plan.weights import stored_bytes
from quantpipe.recipe.quantize_section import QuantizeSection
from quantpipe.recipe.schema import Recipe

START_S = 20.0  # imports, reading and writing
FLOPS_PER_CPU_S = 44e9  # of one core, forward passes, Hessians and solves together
SOLVE_FACTOR = 3  # operations per cubed input width: a factorization, an inverse, and the columns' updates
PROCESS_BYTES = 900_000_000
TABLE_COPIES = 3  # embedding and head together, in float32
WORK_COPIES = 4  # of one block's weights and of the largest Hessian, in float32
FLOAT32_BYTES = 4
# Processor time next to GPTQ's on the same tokens. Rounding to nearest reads texts for its scales or a transform only.
GPTQ_FACTOR, BOTH_FACTOR = 1.0, 1.58
RTN_FACTOR, RTN_HESSIAN_FACTOR = 0.6, 0.95
TRANSFORM_FACTORS = {"awq": 0.28, "smoothquant": 0.84, "rotate": 0.0, "k_smooth": 0.0}  # on top


@dataclass(frozen=True)
class QuantizationRun:
    """Rough: a factor of two either way in time."""

    processor_time_s: float
    peak_memory_bytes: int
    disk_bytes: int
    artifact_bytes: int


def quantization_run(base: ModelShape, quantized: ModelShape, recipe: Recipe) -> QuantizationRun:
    """For a recipe that has a ``quantize`` section."""
    assert recipe.quantize is not None, "only a recipe that quantizes has such a run"
    num_tokens = 0
    if recipe.calibration is not None:
        num_tokens = recipe.calibration.num_sequences * recipe.calibration.sequence_length
    artifact = stored_bytes(quantized)
    hidden = 2 * num_tokens * base.hidden_size * FLOAT32_BYTES  # of one block's inputs and outputs
    return QuantizationRun(
        processor_time_s=START_S + _factor(recipe.quantize) * _flops(base, num_tokens) / FLOPS_PER_CPU_S,
        peak_memory_bytes=_peak_bytes(base),
        disk_bytes=2 * artifact + hidden,  # what is done so far is kept beside the artifact that is written
        artifact_bytes=artifact,
    )


def _flops(base: ModelShape, num_tokens: int) -> float:
    """Forward passes, Hessians, solves; none without calibration."""
    if num_tokens == 0:
        return 0.0
    forward = 2.0 * num_tokens * sum(each.num_used_weights for each in base.linears)
    widths = _input_widths(base)
    return forward + 2.0 * num_tokens * sum(width**2 for width in widths) + SOLVE_FACTOR * sum(w**3 for w in widths)


def _input_widths(base: ModelShape) -> list[int]:
    """Of each tensor that linears read: query, key and value read one, gate and up another."""
    sharing = ("k_proj", "v_proj", "up_proj")
    return [
        each.in_features for each in base.linears if not each.name.endswith(sharing) for _ in range(each.num_copies)
    ]


def _factor(section: QuantizeSection) -> float:
    return _solver_factor(section) + sum(TRANSFORM_FACTORS[each.name] for each in section.transforms)


def _solver_factor(section: QuantizeSection) -> float:
    solver = section.solver
    if solver.name == "gptq":
        return BOTH_FACTOR if solver.propagate == "both" else GPTQ_FACTOR
    return RTN_HESSIAN_FACTOR if solver.scales == "hessian" else RTN_FACTOR


def _peak_bytes(base: ModelShape) -> int:
    tables = TABLE_COPIES * base.vocab_size * base.hidden_size
    block = sum(each.num_weights for each in base.linears) // len(base.attention)
    largest = max(each.in_features for each in base.linears)
    return PROCESS_BYTES + FLOAT32_BYTES * (tables + WORK_COPIES * (block + largest**2))
