"""What a run says of its calibration set: ``coverage.json``, ``coverage.md`` and plots in the run's folder.

They are made again only when something changed that they depend on: activations take a pass through the whole model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantpipe.calibrate.coverage.coverage_plots import PLOT_NAMES, plot_beyond, plot_saturation, plot_text
from quantpipe.calibrate.coverage.coverage_report import activation_summary, render_markdown, text_summary
from quantpipe.calibration import CalibrationSet
from quantpipe.calibration.views.coverage import Coverage, HeldOutIds, measure_coverage
from quantpipe.gate.record import write_text_atomically
from quantpipe.quantize.activation_coverage import ActivationCoverage, measure_activations
from quantpipe.quantize.model.documents_apart import check_documents_apart
from quantpipe.quantize.model.loading import StreamedModel
from quantpipe.report import Reporter

JSON_NAME, MARKDOWN_NAME = "coverage.json", "coverage.md"
WORK_NAME = "coverage-work"
SCHEMA = 1


def report_coverage(
    output: Path,
    calibration: CalibrationSet,
    vocabulary_size: int,
    held_out: HeldOutIds,
    model: StreamedModel | None,
    made_with: Mapping[str, Any],
    reporter: Reporter,
) -> None:
    """Write the coverage of ``calibration`` under ``output``, its activations too where a ``model`` is given.

    ``held_out`` are windows of token ids by domain, those of one domain equally long; ``made_with`` names whatever else
    the figures depend on, such as the model's digest.
    """
    key = _key(calibration, vocabulary_size, held_out, model is not None, made_with)
    if _stored_key(output) == key and (output / MARKDOWN_NAME).is_file():
        reporter.note(f"coverage unchanged: {output / MARKDOWN_NAME}")
        return
    withdraw_coverage(output)
    output.mkdir(parents=True, exist_ok=True)
    text = measure_coverage(calibration, vocabulary_size, held_out)
    activations = None
    if model is not None:
        reporter.stage("coverage: activations of the full-precision model")
        activations = observe(model, calibration, held_out, output / WORK_NAME, reporter)
    for line in (*text_summary(text), *(() if activations is None else activation_summary(activations))):
        reporter.note(line)
    _write(output, key, text, activations)
    reporter.note(f"coverage: {output / MARKDOWN_NAME}")


def observe(
    model: StreamedModel, calibration: CalibrationSet, held_out: HeldOutIds, work_folder: Path, reporter: Reporter
) -> ActivationCoverage:
    """The activations of a set and of held-out windows; ``work_folder`` is for temporary files alone.

    Raises RecipeError where the set keeps documents apart and the model cannot.
    """
    if calibration.position_ids is not None:
        check_documents_apart(model)
    windows = {name: np.array(each, dtype=np.int64) for name, each in held_out.items() if len(each)}
    return measure_activations(
        model, calibration.token_ids, calibration.position_ids, windows, work_folder, reporter.progress
    )


def withdraw_coverage(output: Path) -> None:
    """Remove what an earlier run said, so that nothing stands beside other blocks than it is about."""
    for name in (JSON_NAME, MARKDOWN_NAME, *PLOT_NAMES):
        (output / name).unlink(missing_ok=True)


def coverage_fact(output: Path) -> tuple[tuple[str, str], ...]:
    """The line of the run's report that leads to the coverage; none where there is no coverage."""
    return (("coverage", f"see {MARKDOWN_NAME}"),) if (output / MARKDOWN_NAME).is_file() else ()


def read_coverage(output: Path) -> dict[str, Any] | None:
    """What ``coverage.json`` holds; None where there is none, or none of this version."""
    try:
        record = json.loads((output / JSON_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def _write(output: Path, key: str, text: Coverage, activations: ActivationCoverage | None) -> None:
    plot_text(text, output)
    if activations is not None:
        plot_saturation(activations, output)
        if activations.domains:
            plot_beyond(activations, output)
    record = {
        "schema": SCHEMA,
        "key": key,
        "text": text.to_json(),
        "activations": None if activations is None else activations.to_json(),
    }
    write_text_atomically(output / MARKDOWN_NAME, render_markdown(text, activations))
    write_text_atomically(output / JSON_NAME, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _key(
    calibration: CalibrationSet,
    vocabulary_size: int,
    held_out: HeldOutIds,
    has_activations: bool,
    made_with: Mapping[str, Any],
) -> str:
    depends_on = {
        "schema": SCHEMA,
        "calibration": calibration.digest,
        "documents": [
            [each.source, each.domain, each.language, each.num_tokens, each.num_tokens_used]
            for each in calibration.documents
        ],
        "name": calibration.name,
        "vocabulary_size": vocabulary_size,
        "held_out": {name: _plain(windows) for name, windows in held_out.items()},
        "has_activations": has_activations,
        "made_with": dict(made_with),
    }
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def _plain(windows: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[int(token_id) for token_id in window] for window in windows]


def _stored_key(output: Path) -> str | None:
    try:
        record = json.loads((output / JSON_NAME).read_text(encoding="utf-8"))
        return str(record["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none there, or none of this version: it is made again
