"""From a recipe's ``quantize`` section to a quantized model: which schemes, which method, then the loop."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantpipe.quantize import SOLVERS, TRANSFORM_CHECKS, TRANSFORMS
from quantpipe.quantize.kv_int8 import KVObserver, KVRecord
from quantpipe.quantize.loop.checkpoint import WorkFolder
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.loop.sequential import Method, quantize_blocks
from quantpipe.quantize.model.documents_apart import check_documents_apart
from quantpipe.quantize.model.gpt2 import conversion_note
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.model.watched_attention import watched_attention
from quantpipe.quantize.solvers.solver import SolverOptions
from quantpipe.quantize.targets.allocate import Allocation, Budget, LinearSet, allocate
from quantpipe.quantize.targets.discover import Targets, check_schemes, find_targets
from quantpipe.quantize.targets.flat_inputs import check_token_scales
from quantpipe.quantize.targets.sensitivity import measure_sensitivity, sample_tokens
from quantpipe.quantize.targets.sensitivity_store import remembered
from quantpipe.recipe.quantize_section import AllocateSection, GptqSolver, QuantizeSection
from quantpipe.recipe.schemes import scheme_of
from quantpipe.report import Reporter

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quantization:
    """A quantized model, what was quantized, and what was measured on the way. ``kv`` is None without statistics."""

    model: QuantizedModel
    targets: Targets
    allocation: Allocation | None
    kv: KVRecord | None

    def record(self) -> dict[str, Any]:
        """What the manifest says of it. Holds no times: the same inputs give the same bytes."""
        return {
            "layers": [
                {key: value for key, value in asdict(layer).items() if key != "seconds"} for layer in self.model.layers
            ],
            "transformed": [asdict(record) for record in self.model.transformed],
            "allocation": None if self.allocation is None else [asdict(choice) for choice in self.allocation.choices],
            "average_bits": None if self.allocation is None else self.allocation.average_bits,
            "kv_errors": None if self.kv is None else {name: asdict(mode) for name, mode in self.kv.modes.items()},
        }


def open_model(folder: Path, trust_remote_code: bool = False) -> StreamedModel:
    """The base model as the quantizer runs it: block by block, its attention watched."""
    return StreamedModel.open(folder, trust_remote_code, attention=watched_attention())


def quantize_model(
    section: QuantizeSection,
    model: StreamedModel,
    token_ids_SL: TokenIds | None,
    work_folder: Path,
    fingerprint: str,
    reporter: Reporter,
    position_ids_SL: TokenIds | None = None,
) -> Quantization:
    """Quantize ``model`` as ``section`` says on calibration tokens [S, L] (None where nothing reads data).

    ``position_ids_SL`` start anew at each document, so that none attends to another; None: a sequence is one document.
    What cannot be quantized is refused before anything long begins. A run that was killed is taken up again where
    ``work_folder`` holds finished blocks under the same ``fingerprint``.
    """
    targets = targets_of(section, model)
    for note in (conversion_note(model.base), *targets.notes):
        if note is not None:
            reporter.note(note)
    if position_ids_SL is not None:
        check_documents_apart(model)
    allocation = None
    if section.allocate is not None:
        own_folder = WorkFolder.open(work_folder, fingerprint).folder
        sample, positions = (
            None if each is None else sample_tokens(each, section.allocate.num_tokens)
            for each in (token_ids_SL, position_ids_SL)
        )
        assert sample is not None, "a recipe with `allocate` has calibration data"
        sets = remembered(
            own_folder,
            lambda: measure_sensitivity(model, targets.schemes, sample, own_folder, reporter.progress, positions),
        )
        allocation = _allocate(section, section.allocate, sets, reporter)
        schemes = {name: allocation.schemes[name] for name in targets.schemes}  # in the model's order
        targets = Targets(schemes, targets.ignored, targets.notes)
        check_schemes(model.module, targets.schemes, targets.ignored)
    method = _method(section, model, has_data=token_ids_SL is not None)
    quantized = quantize_blocks(
        model, targets, method, token_ids_SL, work_folder, fingerprint, reporter.progress, position_ids_SL
    )
    inside = [layer for layer in quantized.layers if layer.name.startswith(f"{model.blocks.path}.")]
    unseen = [layer.name for layer in inside if method.reads_data and not layer.num_tokens]
    if unseen:
        reporter.note(
            f"{len(unseen)} linears of experts saw no calibration token and are rounded to nearest, such as "
            f"{unseen[0]}; more calibration tokens may reach them"
        )
    kv = None if method.kv is None else method.kv.finish(len(model.blocks.blocks))
    return Quantization(quantized, targets, allocation, kv)


def targets_of(section: QuantizeSection, model: StreamedModel) -> Targets:
    """The linears that ``section`` quantizes, and how. RecipeError where some of it cannot be."""
    scheme = scheme_of(section.scheme)
    overrides = [(each.modules, scheme_of(each.scheme)) for each in section.overrides]
    targets = find_targets(model.module, model.blocks, section.ignore, scheme, overrides)
    sections = {each: f"quantize.overrides[{index}].scheme" for index, (_, each) in enumerate(overrides)}
    check_token_scales(model, targets.schemes, sections | {scheme: "quantize.scheme"})
    if section.allocate is not None:
        _check_budget(section, section.allocate, model, targets)
    return targets


def check_transforms(section: QuantizeSection, model: StreamedModel) -> None:
    """Raise RecipeError where a transform cannot be made for ``model``, which is left as it is."""
    for each in section.transforms:
        if each.name in TRANSFORM_CHECKS:
            TRANSFORM_CHECKS[each.name](each, model)


def _method(section: QuantizeSection, model: StreamedModel, has_data: bool) -> Method:
    transforms = [TRANSFORMS[each.name](each, model) for each in section.transforms]
    # What cache modes a model bears is measured where a quantized one is asked for and there is data to measure on.
    kv = KVObserver(section.kv_cache) if has_data and section.kv_cache != "auto" else None
    solve, solver = SOLVERS[section.solver.name], section.solver
    if isinstance(solver, GptqSolver):
        options = SolverOptions(
            damp_frac=solver.damp_frac, signed_scales=solver.signed_scales, correction_frac=solver.correction_frac
        )
        return Method(transforms, solve, options, True, solver.sequential, solver.propagate, kv)
    options = SolverOptions(scales=solver.scales)
    return Method(transforms, solve, options, reads_data=solver.scales == "hessian", kv=kv)


def _check_budget(section: QuantizeSection, wanted: AllocateSection, model: StreamedModel, targets: Targets) -> None:
    """Raise RecipeError for a budget outside what the schemes can take, which depends on shapes only."""
    low = scheme_of(section.scheme)
    free: list[LinearSet] = []
    fixed: list[LinearSet] = []
    for name, scheme in targets.schemes.items():
        weight = model.module.get_parameter(f"{name}.weight")
        part = LinearSet({name: (weight.shape[0], weight.shape[1])}, scheme, model.dtype_of(f"{name}.weight"))
        (free if scheme == low else fixed).append(part)
    allocate(free, scheme_of(wanted.scheme), Budget(wanted.average_bits, wanted.max_bytes), fixed)


def _allocate(
    section: QuantizeSection, wanted: AllocateSection, sets: Sequence[LinearSet], reporter: Reporter
) -> Allocation:
    """Upgrade those of ``sets`` in the recipe's own scheme that cost most, as the budget allows."""
    low = scheme_of(section.scheme)
    free = [part for part in sets if part.scheme == low]
    fixed = [part for part in sets if part.scheme != low]
    budget = Budget(wanted.average_bits, wanted.max_bytes)
    allocation = allocate(free, scheme_of(wanted.scheme), budget, fixed)
    num_upgraded = sum(choice.is_upgraded for choice in allocation.choices)
    reporter.note(
        f"{num_upgraded} of {len(allocation.choices)} sets of linears get {scheme_of(wanted.scheme).label}: "
        f"{allocation.average_bits:.2f} bits per weight on average"
    )
    return allocation
