"""Making the candidate: base model in, verified artifact on disk out. Nothing here evaluates anything.

An artifact whose fingerprint matches what the recipe asks for is used again; any change of weights, calibration
blocks, quantization settings or versions makes a new one.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quantpipe import __version__
from quantpipe.calibration.build import CalibrationSet, build_calibration
from quantpipe.engine.config import EngineConfig
from quantpipe.errors import ArtifactError, DataError, RecipeError
from quantpipe.evaluate.parity import check_parity, require_parity
from quantpipe.formats.artifact import Artifact, verify
from quantpipe.formats.artifact_writer import estimated_bytes, quantization_config, write_artifact
from quantpipe.formats.scheme import WeightScheme, w4a16, w8a8
from quantpipe.gate.record import library_versions, withdraw_verdict, write_text_atomically
from quantpipe.gate.report import ParityRow
from quantpipe.quantize import SOLVERS, TRANSFORMS
from quantpipe.quantize.discover import DecoderBlocks, Targets, find_blocks, find_targets
from quantpipe.quantize.loading import load_base_model
from quantpipe.quantize.sequential import QuantizedModel, SolverSettings, quantize_blocks
from quantpipe.recipe.quantize_section import W8A8, GptqSolver, QuantizeSection
from quantpipe.recipe.schema import Recipe
from quantpipe.report import Reporter
from quantpipe.sources.base_model import BaseModel

ARTIFACT_FOLDER = "artifact"
PARITY_NAME = "parity.json"
# Room for the temporary copy and the sidecars beside the artifact itself.
DISK_HEADROOM_FRAC = 0.1


@dataclass(frozen=True)
class Candidate:
    """A verified artifact, the parity measured when it was made, and whether it stood there before this run."""

    artifact: Artifact
    parity: tuple[ParityRow, ...]
    was_reused: bool


def make_candidate(recipe: Recipe, base: BaseModel, config: EngineConfig, reporter: Reporter) -> Candidate:
    """Quantize as the recipe says, write the artifact under its ``output``, and check parity.

    Raises RecipeError and DataError before any long work where the recipe cannot be carried out.
    """
    base_artifact = Artifact.open(base.folder)
    if base_artifact.schemes and recipe.quantize is not None:
        raise RecipeError(f"model: {base.folder} is quantized already; give the full-precision model")
    folder = recipe.output / ARTIFACT_FOLDER
    _check_disk(recipe.output, base_artifact)
    calibration = _build_calibration(recipe, base, reporter)
    fingerprint = _fingerprint(recipe, base, calibration)
    reused = _reusable(folder, fingerprint)
    if reused is not None:
        reporter.note(f"unchanged since the last run: {folder}")
        return reused
    model = load_base_model(base.folder, recipe.model.trust_remote_code)
    quantized = QuantizedModel({}, ())
    quantization: dict[str, Any] | None = None
    if recipe.quantize is not None:
        scheme = scheme_of(recipe.quantize)
        blocks = find_blocks(model)
        targets = find_targets(model, blocks, recipe.quantize.ignore, scheme)
        method = ", ".join([*(t.name for t in recipe.quantize.transforms), recipe.quantize.solver.name, scheme.name])
        reporter.stage(f"quantize {len(targets.schemes)} linears: {method}")
        quantized = _solve(recipe.quantize, model, blocks, targets, scheme, calibration, reporter)
        quantization = quantization_config(dict.fromkeys(quantized.weights, scheme), list(targets.ignored))
    reporter.stage(f"write {folder}")
    withdraw_verdict(recipe.output)
    manifest = _manifest(recipe, base, calibration, quantized, fingerprint)
    artifact = write_artifact(
        folder, base_artifact, quantized.weights, quantization, manifest, tensors=quantized.tensors
    )
    reporter.stage("parity: simulated, reloaded by transformers, served")
    parity = _check_parity(model, quantized, base, artifact, config, recipe, reporter)
    return Candidate(artifact, parity, was_reused=False)


def scheme_of(section: QuantizeSection) -> WeightScheme:
    """The storage scheme a recipe asks for."""
    wanted = section.scheme
    if isinstance(wanted, W8A8):
        return w8a8()
    if wanted.name == "w4a16" and wanted.symmetric and wanted.group_size != "channel":
        return w4a16(wanted.group_size)
    raise RecipeError(f"quantize.scheme: {wanted.name} cannot be made yet")


def _check_disk(output: Path, base: Artifact) -> None:
    """Refuse before hours of work what would fail at the very end."""
    existing = next(path for path in (output, *output.parents) if path.exists())
    needed = int(estimated_bytes(base) * (1 + DISK_HEADROOM_FRAC))
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DataError(
            f"{existing}: {free / 1e9:.1f} GB free, the artifact may need {needed / 1e9:.1f} GB; free some space or "
            "choose another `output`"
        )


def _build_calibration(recipe: Recipe, base: BaseModel, reporter: Reporter) -> CalibrationSet | None:
    section = recipe.calibration
    if section is None:
        return None
    reporter.stage(f"calibrate: {section.num_sequences} x {section.sequence_length} tokens of {section.set.name}")
    calibration = build_calibration(
        section.set,
        base.folder,
        section.num_sequences,
        section.sequence_length,
        section.seed,
        section.allow_shortfall,
        reporter.progress,
    )
    for note in calibration.notes:
        reporter.note(note)
    return calibration


def _solve(
    section: QuantizeSection,
    model: nn.Module,
    blocks: DecoderBlocks,
    targets: Targets,
    scheme: WeightScheme,
    calibration: CalibrationSet | None,
    reporter: Reporter,
) -> QuantizedModel:
    settings = None
    if isinstance(section.solver, GptqSolver):
        solver = section.solver
        settings = SolverSettings(solver.damp_frac, solver.sequential, solver.propagate == "quantized")
    token_ids_SL = calibration.token_ids if calibration is not None else None
    solve = SOLVERS[section.solver.name]
    transforms = [TRANSFORMS[transform.name] for transform in section.transforms]
    quantized = quantize_blocks(
        model, blocks, targets, scheme, solve, settings, token_ids_SL, reporter.progress, transforms
    )
    for note in _transform_notes(quantized):
        reporter.note(note)
    return quantized


def _transform_notes(quantized: QuantizedModel) -> Iterator[str]:
    """How many groups of linears were transformed, and for each reason why others were not, one of them."""
    if quantized.transformed:
        num_changed = sum(record.producer is not None for record in quantized.transformed)
        yield f"{num_changed} of {len(quantized.transformed)} groups of linears rescaled"
    left = [record for record in quantized.transformed if record.producer is None]
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
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def _reusable(folder: Path, fingerprint: str) -> Candidate | None:
    """The artifact at ``folder`` if it was made from the same things, is intact, and its parity was recorded."""
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
    return Candidate(artifact, parity, was_reused=True) if all(row.agrees for row in parity) else None


def _manifest(
    recipe: Recipe,
    base: BaseModel,
    calibration: CalibrationSet | None,
    quantized: QuantizedModel,
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
        "calibration": None if calibration is None else _calibration_record(calibration, recipe),
        "quantize": section.model_dump(mode="json") if section is not None else None,
        "versions": library_versions(),
        "layers": [
            {"name": layer.name, "output_error": layer.output_error, "damp_frac": layer.damp_frac}
            for layer in quantized.layers
        ],
        "transformed": [asdict(record) for record in quantized.transformed],
    }


def _calibration_record(calibration: CalibrationSet, recipe: Recipe) -> dict[str, Any]:
    num_sequences, sequence_length = calibration.token_ids.shape
    return {
        "name": calibration.name,
        "digest": calibration.digest,
        "num_sequences": num_sequences,
        "num_sequences_asked": calibration.num_sequences_asked,
        "sequence_length": sequence_length,
        "seed": recipe.calibration.seed if recipe.calibration is not None else None,
        "account": [asdict(account) for account in calibration.account],
    }


def _check_parity(
    model: nn.Module,
    quantized: QuantizedModel,
    base: BaseModel,
    artifact: Artifact,
    config: EngineConfig,
    recipe: Recipe,
    reporter: Reporter,
) -> tuple[ParityRow, ...]:
    """Measure parity, record it beside the artifact, and refuse an artifact that lacks it. Uses up ``model``."""
    trust = recipe.model.trust_remote_code
    rows = check_parity(model, quantized, base.folder, artifact.folder, config, trust)
    for row in rows:
        reporter.note(f"{row.comparison}: mean KL {row.found:.2g} (tolerance {row.tolerance:.2g})")
    record = {"artifact_digest": artifact.digest, "rows": [asdict(row) for row in rows]}
    write_text_atomically(recipe.output / PARITY_NAME, json.dumps(record, indent=2) + "\n")
    require_parity(rows, artifact.folder)
    return tuple(rows)
