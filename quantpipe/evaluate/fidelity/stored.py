"""Baselines that were stored, found again by what they were made from."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantpipe.evaluate.fidelity.reference import (
    SCHEMA,
    TOP_K,
    Reference,
    load_reference,
    make_reference,
    save_reference,
    windows_digest,
)
from quantpipe.evaluate.served import ServedModel
from quantpipe.report import Reporter

FOLDER_NAME = "references"


def stored_reference(
    baseline: ServedModel,
    made_from: Sequence[Any],
    windows: Sequence[Sequence[int]],
    cache_folder: Path,
    reporter: Reporter,
    top_k: int = TOP_K,
) -> Reference:
    """The baseline's predictions from the cache; where it lacks them, the baseline is run and they are stored.

    ``made_from``: what its numbers depend on beside the windows, such as the model's digest, as JSON data.
    """
    path = reference_path(made_from, windows, cache_folder, top_k)
    found = load_reference(path)
    if found is None:
        found = make_reference(baseline, windows, top_k, reporter.progress)
        save_reference(found, path)
    else:
        reporter.note(f"the baseline's predictions were stored before: {path}")
    reporter.note(f"{top_k} tokens of each position leave {100 * found.mean_tail:.2g} % to all others")
    return found


def reference_path(made_from: Sequence[Any], windows: Sequence[Sequence[int]], cache_folder: Path, top_k: int) -> Path:
    """Where it lies: the same for the same content, whatever made it."""
    content = json.dumps([SCHEMA, made_from, windows_digest(windows), top_k], sort_keys=True, default=str)
    return cache_folder / FOLDER_NAME / f"{hashlib.sha256(content.encode()).hexdigest()}.safetensors"
