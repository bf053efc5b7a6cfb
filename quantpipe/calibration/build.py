"""From a set to a CalibrationSet: read, choose, pack, and say what became of every source."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantpipe.calibration.account import SourceAccount
from quantpipe.calibration.calibration_set import Budget, BuildContext, CalibrationSet, Document, digest_blocks
from quantpipe.calibration.candidates import GROUP_CAP, Candidate, Candidates
from quantpipe.calibration.cells import Cell, PoolTooSmallError
from quantpipe.calibration.definition import SetDefinition, load_set
from quantpipe.calibration.leakage import LeakageIndex
from quantpipe.calibration.manifest import calibration_manifest, shown_path, tokenizer_digest
from quantpipe.calibration.packing import Packed, Piece, pack, pack_separately, truncate
from quantpipe.calibration.redaction import open_redactor
from quantpipe.calibration.redaction.placeholders import placeholder_key, read_secret
from quantpipe.calibration.rendering import Renderer
from quantpipe.calibration.selection import Selection, select
from quantpipe.calibration.sources import RowKeys
from quantpipe.calibration.survey import Survey, survey
from quantpipe.errors import DataError
from quantpipe.report import Progress, no_progress

FEW_SAMPLES = 16
MIN_MEAN_TOKENS = 16
POOL_GROWTH = 4
HASH_BYTES = 16


def build_calibration(
    set: SetDefinition | Path,
    tokenizer_folder: Path,
    budget: Budget,
    seed: int = 0,
    allow_shortfall: bool = False,
    progress: Progress = no_progress,
    context: BuildContext = BuildContext(),  # noqa: B008  # frozen and empty
) -> CalibrationSet:
    """Build exactly ``budget`` tokens of a set (or the set in this folder); the same arguments give the same bytes.

    Raises RecipeError for a wrong ``set.yaml``; DataError for unusable rows and for rows that overlap an evaluation
    text (unless the set or the context says to drop them), and for a set with too few tokens unless
    ``allow_shortfall``, which then gives as many whole blocks as there are.
    """
    definition = load_set(set) if isinstance(set, Path) else set
    renderer = open_renderer(definition, tokenizer_folder)
    leakage = LeakageIndex(context.eval_texts)
    scale = 1
    while True:
        found = survey(definition, leakage, budget.num_tokens, seed, context, progress, scale)
        found.problems.raise_if_any()
        if context.on_leakage == "refuse":
            found.leaks.raise_if_any(definition.name)
        _require_rows(definition, found)
        try:
            return _Build(definition, renderer, budget, seed, allow_shortfall).finish(found, tokenizer_folder)
        except PoolTooSmallError:
            scale *= POOL_GROWTH


def open_renderer(definition: SetDefinition, tokenizer_folder: Path) -> Renderer:
    """What renders the set's rows. Raises DataError where the tokenizer lacks what the set needs."""
    sources = enumerate(definition.sources)
    files = {
        index: definition.folder / source.template_file
        for index, source in sources
        if isinstance(source, RowKeys) and source.template_file is not None
    }
    renderer = Renderer(tokenizer_folder, files)
    if any(isinstance(source, RowKeys) and source.uses_template for source in definition.sources):
        renderer.require_template()
    return renderer
