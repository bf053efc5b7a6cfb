"""Making the candidate: base model in, verified artifact on disk out. Nothing here evaluates anything.

An artifact whose fingerprint matches what the recipe asks for is used again; any change of weights, calibration
blocks, quantization settings or versions makes a new one.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quantpipe import __version__, formats, quantize
from quantpipe.calibrate.coverage.run_coverage import report_coverage, withdraw_coverage
from quantpipe.calibrate.recipe_blocks import budget_of, calibrate, is_packed_apart, write_manifest
from quantpipe.calibration import CalibrationSet
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.templates.renderer import Renderer
from quantpipe.calibration.views.coverage import HeldOutIds
from quantpipe.disk import disk_refusal
from quantpipe.engine.config import EngineConfig
from quantpipe.engine.device_memory import HostMemory
from quantpipe.errors import ArtifactError, DataError, QuantpipeError, RecipeError
from quantpipe.evaluate.parity import check_parity, compares_served, memory_shortage, require_parity
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.formats.artifact_writer import estimated_bytes, write_artifact
from quantpipe.formats.digests import KV_SCALES_NAME, file_digest
from quantpipe.gate.record import ARTIFACT_FOLDER, library_versions, withdraw_verdict, write_text_atomically
from quantpipe.gate.report import ParityRow
from quantpipe.quantize.by_recipe import (
    Quantization,
    check_transforms,
    open_model,
    quantize_model,
    targets_of,
)
from quantpipe.quantize.layer_table import layer_table
from quantpipe.quantize.loop.checkpoint import discard_work
from quantpipe.quantize.loop.records import QuantizedModel
from quantpipe.quantize.model.documents_apart import check_documents_apart
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.quantize.preflight import check_save
from quantpipe.quantize.transforms.transform import TransformRecord
from quantpipe.quantize.writing import write_quantized
from quantpipe.recipe.lengths import check_length
from quantpipe.recipe.quantize_rules import reads_data
from quantpipe.recipe.quantize_section import GptqSolver
from quantpipe.recipe.schema import Recipe
from quantpipe.recipe.schemes import scheme_of
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

PARITY_NAME = "parity.json"
# What a run has done so far; empty once the artifact is written.
WORK_FOLDER = "work"
FLOAT32_BYTES = 4
# Room for the temporary copy and the sidecars beside the artifact itself.
DISK_HEADROOM_FRAC = 0.1


@dataclass(frozen=True)
class Candidate:
    """A verified artifact, the parity measured when it was made, and whether it stood there before this run."""

    artifact: Artifact
    parity: tuple[ParityRow, ...]
    was_reused: bool


def make_candidate(
    recipe: Recipe,
    base: BaseModel,
    config: EngineConfig | None,
    reporter: Reporter,
    texts: Sequence[EvalText] = (),
    held_out: HeldOutIds = MappingProxyType({}),
) -> Candidate:
    """Quantize as the recipe says, write the artifact under its ``output``, and check parity.

    ``config`` None: the runtime does not serve this model, so what it would serve is not compared. ``texts`` are what
    the recipe evaluates on, which no calibration row may overlap, ``held_out`` windows of tokens by domain for the
    coverage of its set. Raises RecipeError and DataError before any long work where the recipe cannot be carried out. A
    run that was killed is taken up again.
    """
    folder = recipe.output / ARTIFACT_FOLDER
    model = open_checked(recipe, base)
    calibration = calibrate(recipe, base, texts, reporter)
    fingerprint = _fingerprint(recipe, base, calibration)
    with _coverage_of_what_is_made(recipe.output):
        _report_coverage(recipe, base, model, calibration, held_out, reporter)
        reused = _reusable(folder, fingerprint, is_served=config is not None)
        if reused is not None:
            reporter.note(f"unchanged since the last run: {folder}")
            if calibration is not None:
                write_manifest(recipe.output, calibration)
            return reused
        if (shortage := _shortage(base)) is not None:
            reporter.note(f"{shortage}: the artifact will be made, and refused unless there is more memory by then")
        quantization = _quantize(recipe, model, calibration, fingerprint, reporter)
    reporter.stage(f"write {folder}")
    withdraw_verdict(recipe.output)
    if calibration is not None:
        write_manifest(recipe.output, calibration)
    manifest = _manifest(recipe, base, calibration, quantization, fingerprint)
    artifact = _write(folder, model, quantization, manifest)
    del model  # parity opens models of its own, one at a time
    parity = _check_parity(quantization, base, artifact, config, recipe, reporter)
    discard_work(recipe.output / WORK_FOLDER)
    return Candidate(artifact, parity, was_reused=False)


def open_checked(recipe: Recipe, base: BaseModel) -> StreamedModel:
    """The base model, opened; what of the recipe cannot be carried out on it is refused, before any row is read."""
    base_artifact = Artifact.open(base.folder)
    if base_artifact.schemes and recipe.quantize is not None:
        raise RecipeError(f"model: {base.folder} is quantized already; give the full-precision model")
    _check_disk(recipe, base_artifact)
    model = open_model(base.folder, recipe.model.trust_remote_code)
    check_save(recipe.output / ARTIFACT_FOLDER, model.base)
    if recipe.quantize is not None:
        targets_of(recipe.quantize, model)
        model.check_finite()
        _check_lengths(recipe, model)
        check_transforms(recipe.quantize, model)
        if is_packed_apart(recipe):
            check_documents_apart(model)
    return model


@contextmanager
def _coverage_of_what_is_made(output: Path) -> Iterator[None]:
    """Within it a refusal takes the set's coverage away: nothing was made with the set.

    It stays where the run can go on from where it ended, as after a full disk.
    """
    try:
        yield
    except QuantpipeError as error:
        if disk_refusal(error) is None:
            withdraw_coverage(output)
        raise


def _quantize(
    recipe: Recipe, model: StreamedModel, calibration: CalibrationSet | None, fingerprint: str, reporter: Reporter
) -> Quantization | None:
    """Quantize ``model`` and tell what became of it; None where the recipe quantizes nothing."""
    if recipe.quantize is None:
        return None
    names = [*(each.name for each in recipe.quantize.transforms), recipe.quantize.solver.name]
    reporter.stage(f"quantize: {', '.join(names)} to {scheme_of(recipe.quantize.scheme).label}")
    blocks = (None, None) if calibration is None else (calibration.token_ids, calibration.position_ids)
    work = recipe.output / WORK_FOLDER
    quantization = quantize_model(recipe.quantize, model, blocks[0], work, fingerprint, reporter, blocks[1])
    for note in transform_notes(quantization.model.transformed):
        reporter.note(note)
    for line in layer_table(quantization.model).splitlines():
        reporter.note(line)
    return quantization


def _write(
    folder: Path, model: StreamedModel, quantization: Quantization | None, manifest: Mapping[str, Any]
) -> Artifact:
    if quantization is None:
        return write_artifact(folder, model.base, {}, None, manifest)
    scales = quantization.kv.scales if quantization.kv is not None else None
    sidecars = {} if scales is None else {KV_SCALES_NAME: scales.tensors()}
    return write_quantized(folder, model, quantization.model, quantization.targets, manifest, sidecars)


def _report_coverage(
    recipe: Recipe,
    base: BaseModel,
    model: StreamedModel,
    calibration: CalibrationSet | None,
    held_out: HeldOutIds,
    reporter: Reporter,
) -> None:
    """Say what the set covers, as far as the recipe asks for that."""
    level = recipe.calibration.coverage if recipe.calibration is not None else "none"
    if calibration is None or level == "none":
        withdraw_coverage(recipe.output)
        return
    observed = model if level == "activations" else None
    made_with = {"base": base.digest, "code": code_digest(), "versions": library_versions()}
    size = Renderer(base.folder).vocabulary_size
    report_coverage(recipe.output, calibration, size, held_out, observed, made_with, reporter)


def _check_lengths(recipe: Recipe, model: StreamedModel) -> None:
    """Raise RecipeError where the model has no positions for the sequences that it is to read."""
    if reads_data(recipe.model_dump(mode="json")):
        check_length("calibration.sequence_length", budget_of(recipe).sequence_length, model.max_positions)
    if recipe.evaluate is not None and recipe.evaluate.divergence is not None:
        check_length("evaluate.divergence.window_tokens", recipe.evaluate.divergence.window_tokens, model.max_positions)


def _check_disk(recipe: Recipe, base: Artifact) -> None:
    """Refuse before hours of work what would fail at the very end."""
    existing = next(path for path in (recipe.output, *recipe.output.parents) if path.exists())
    artifact = estimated_bytes(base) * (1 + DISK_HEADROOM_FRAC)
    # While it is made, its tensors lie in the work folder too, and the hidden states that enter and leave a block.
    needed = int(2 * artifact + _hidden_bytes(recipe, base)) if recipe.quantize is not None else int(artifact)
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DataError(
            f"output: {existing}: {free / 1e9:.2f} GB free, the artifact and the work on it may need "
            f"{needed / 1e9:.2f} GB; free some space or choose another"
        )


def _hidden_bytes(recipe: Recipe, base: Artifact) -> int:
    section, hidden_size = recipe.calibration, base.config.get("hidden_size", 0)
    if section is None or not isinstance(hidden_size, int):
        return 0
    solver = recipe.quantize.solver if recipe.quantize is not None else None
    num_streams = 2 if isinstance(solver, GptqSolver) and solver.propagate == "both" else 1
    budget = budget_of(recipe)
    # a mask for each sequence, and another where some layers have a window
    masks = 2 * budget.sequence_length if is_packed_apart(recipe) else 0
    return budget.num_tokens * (2 * num_streams * hidden_size * FLOAT32_BYTES + masks)


def transform_notes(transformed: Sequence[TransformRecord]) -> Iterator[str]:
    """How many groups of linears were transformed, and for each reason why others were not, one of them."""
    if transformed:
        num_changed = sum(record.producer is not None for record in transformed)
        yield f"{num_changed} of {len(transformed)} groups of linears transformed"
    left = [record for record in transformed if record.producer is None]
    for reason, num_left in Counter(record.reason for record in left).items():
        example = next(record for record in left if record.reason == reason)
        yield f"{num_left} left as they are, such as {', '.join(example.linears)}: {reason}"


def _fingerprint(recipe: Recipe, base: BaseModel, calibration: CalibrationSet | None) -> str:
    """SHA-256 over everything the artifact's tensors depend on; limits or comments of the recipe may change freely."""
    made_from = {
        "base": base.digest,
        "calibration": calibration.digest if calibration is not None else None,
        "quantize": recipe.quantize.model_dump(mode="json") if recipe.quantize is not None else None,
        "versions": library_versions(),
        "code": code_digest(),
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def code_digest() -> str:
    """SHA-256 over the sources that an artifact's bytes depend on: a version number does not change with every edit."""
    total = hashlib.sha256()
    for package in (quantize, formats):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            total.update(f"{path.relative_to(folder)}:{file_digest(path)}\n".encode())
    return total.hexdigest()


def _reusable(folder: Path, fingerprint: str, is_served: bool) -> Candidate | None:
    """The artifact at ``folder`` if it was made from the same things, is intact, and its parity was recorded.

    One made where nothing could be served (``quantize`` without the GPU that its engine needs) was not compared with
    what is served: where that ``is_served`` now, it is made again.
    """
    try:
        artifact = Artifact.open(folder)
        if (artifact.manifest or {}).get("fingerprint") != fingerprint or verify(folder):
            return None
        record = json.loads((folder.parent / PARITY_NAME).read_text(encoding="utf-8"))
        if record["artifact_digest"] != artifact.digest:
            return None
        parity = tuple(ParityRow(**row) for row in record["rows"])
    except (ArtifactError, OSError, ValueError, KeyError, TypeError):
        return None  # whatever stands there is not a finished artifact of this recipe; it is replaced
    is_proved = all(row.agrees for row in parity) and (not is_served or compares_served(parity))
    return Candidate(artifact, parity, was_reused=True) if is_proved else None


def _manifest(
    recipe: Recipe,
    base: BaseModel,
    calibration: CalibrationSet | None,
    quantization: Quantization | None,
    fingerprint: str,
) -> dict[str, Any]:
    """Where the artifact came from. Holds no dates or times: the same inputs give the same bytes."""
    section = recipe.quantize
    return {
        "quantpipe_version": __version__,
        "name": recipe.name,
        "fingerprint": fingerprint,
        "kv_cache": section.kv_cache if section is not None else "auto",
        "recipe": recipe.source_text,
        "overrides": list(recipe.overrides),
        "base": {"origin": base.origin, "digest": base.digest, "is_dequantized": base.is_dequantized},
        "calibration": None if calibration is None else _calibration_record(calibration),
        "quantize": section.model_dump(mode="json") if section is not None else None,
        "versions": library_versions(),
        **(quantization.record() if quantization is not None else {}),
    }


def _calibration_record(calibration: CalibrationSet) -> dict[str, Any]:
    num_sequences, sequence_length = calibration.token_ids.shape
    return {
        "name": calibration.name,
        "digest": calibration.digest,
        "num_sequences": num_sequences,
        "num_sequences_asked": calibration.num_sequences_asked,
        "sequence_length": sequence_length,
        "seed": calibration.manifest.get("seed"),
        "account": [asdict(account) for account in calibration.account],
    }


def _shortage(base: BaseModel) -> str | None:
    """Why there is too little memory for parity; None where it suffices, or the system does not tell of it."""
    try:
        return memory_shortage(Artifact.open(base.folder), HostMemory().available_bytes())
    except QuantpipeError:
        return None


def _check_parity(
    quantization: Quantization | None,
    base: BaseModel,
    artifact: Artifact,
    config: EngineConfig | None,
    recipe: Recipe,
    reporter: Reporter,
) -> tuple[ParityRow, ...]:
    """Measure parity, record it beside the artifact, and refuse an artifact that lacks it."""
    if (shortage := _shortage(base)) is not None:
        raise DataError(
            f"{artifact.folder}: {shortage}; the artifact is written and unproved: run the same again where there is "
            "more memory, with this output; its finished blocks are used again"
        )
    reporter.stage("parity: simulated, reloaded by transformers" + (", served" if config is not None else ""))
    quantized = quantization.model if quantization is not None else QuantizedModel({}, ())
    trust = recipe.model.trust_remote_code
    rows = check_parity(quantized, base.folder, artifact.folder, config, trust)
    for row in rows:
        reporter.note(f"{row.comparison}: mean KL {row.found:.2g} (tolerance {row.tolerance:.2g})")
    record = {"artifact_digest": artifact.digest, "rows": [asdict(row) for row in rows]}
    write_text_atomically(recipe.output / PARITY_NAME, json.dumps(record, indent=2) + "\n")
    require_parity(rows, artifact.folder)
    return tuple(rows)
