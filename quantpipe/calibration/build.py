"""From a set's folder to a CalibrationSet: read, render, choose, pack, and say what became of every source."""

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import assert_never

from quantpipe.calibration.calibration_set import CalibrationSet, digest_blocks
from quantpipe.calibration.definition import JsonlSource, PythonStdlibSource, SetDefinition, Source, load_set
from quantpipe.calibration.jsonl import read_jsonl
from quantpipe.calibration.packing import Packed, Selection
from quantpipe.calibration.python_stdlib import read_python_stdlib
from quantpipe.calibration.rendering import Renderer
from quantpipe.calibration.samples import RowProblems, Sample
from quantpipe.errors import DataError
from quantpipe.report import Progress, no_progress

BATCH_SAMPLES = 256
MIN_DISTINCT_SAMPLES = 16
MIN_MEAN_TOKENS = 16


def build_calibration(
    set_folder: Path,
    tokenizer_folder: Path,
    num_sequences: int,
    sequence_length: int,
    seed: int = 0,
    allow_shortfall: bool = False,
    progress: Progress = no_progress,
) -> CalibrationSet:
    """Build exactly ``num_sequences`` blocks of ``sequence_length`` tokens; the same arguments give the same bytes.

    Raises RecipeError for a wrong ``set.yaml``; DataError for unusable rows (one line each), and for a set with too
    few tokens unless ``allow_shortfall``, which then gives as many whole blocks as there are.
    """
    definition = load_set(set_folder)
    renderer = Renderer(tokenizer_folder)
    if any(source.uses_template for source in definition.sources):
        renderer.require_template()
    selection = Selection(num_sequences * sequence_length, len(definition.sources))
    problems = RowProblems()
    for index, source in enumerate(progress(definition.sources, len(definition.sources), "calibration sources")):
        ranks = random.Random(f"{seed}/{index}")  # of its own: a source's order does not depend on the others
        for token_ids in _render(read_source(source, set_folder, problems), renderer, problems):
            selection.offer(index, ranks.random(), token_ids)
        if selection.num_samples[index] == 0 and not problems.num_rows:
            problems.add(f"{definition.file}: sources[{index}]", f"{source.label} gave no samples; fill or remove it")
    problems.raise_if_any()
    packed = selection.pack([source.label for source in definition.sources], sequence_length)
    _check_size(definition, packed, selection.num_tokens_available, num_sequences, allow_shortfall)
    _check_variety(definition, packed)
    return CalibrationSet(
        name=definition.name,
        token_ids=packed.token_ids,
        num_sequences_asked=num_sequences,
        account=packed.account,
        digest=digest_blocks(packed.token_ids),
        notes=tuple(_notes(packed, renderer, num_sequences)),
    )


def read_source(source: Source, folder: Path, problems: RowProblems) -> Iterator[Sample]:
    """The samples of one source. A new kind is a case here and a line in ``definition.KINDS``."""
    match source:
        case JsonlSource():
            return read_jsonl(source, folder, problems)
        case PythonStdlibSource():
            return read_python_stdlib(source)
        case _:
            assert_never(source)


def _render(samples: Iterator[Sample], renderer: Renderer, problems: RowProblems) -> Iterator[list[int]]:
    while batch := list(islice(samples, BATCH_SAMPLES)):
        yield from renderer.encode(batch, problems)


def _check_size(
    definition: SetDefinition, packed: Packed, num_available: int, num_sequences: int, allow_shortfall: bool
) -> None:
    num_built, sequence_length = packed.token_ids.shape
    if num_built == num_sequences or (allow_shortfall and num_built > 0):
        return
    asked = f"asked for {num_sequences} x {sequence_length} = {num_sequences * sequence_length:,} tokens"
    if num_built == 0:
        raise DataError(
            f"{definition.file}: {asked}; the set has {num_available:,}, less than one sequence; "
            f"lower calibration.sequence_length to at most {num_available}, or add samples"
        )
    raise DataError(
        f"{definition.file}: {asked}; the set has {num_available:,} ({num_built} x {sequence_length}); lower "
        f"calibration.num_sequences to {num_built}, lower calibration.sequence_length, or set "
        "calibration.allow_shortfall: true"
    )


def _check_variety(definition: SetDefinition, packed: Packed) -> None:
    """Raise DataError where the same few texts fill the blocks over and over."""
    num_used, num_distinct = packed.num_samples_used, packed.num_samples_distinct
    if num_distinct < MIN_DISTINCT_SAMPLES and 2 * num_distinct <= num_used:
        raise DataError(
            f"{definition.file}: the {num_used} samples that fill the blocks hold only {num_distinct} different; "
            f"statistics would follow these few, so give at least {MIN_DISTINCT_SAMPLES} different samples"
        )


def _notes(packed: Packed, renderer: Renderer, num_sequences: int) -> Iterator[str]:
    num_built, num_used, num_distinct = len(packed.token_ids), packed.num_samples_used, packed.num_samples_distinct
    if num_built < num_sequences:
        yield f"calibration: {num_built} of {num_sequences} sequences, as allow_shortfall permits"
    if num_distinct < MIN_DISTINCT_SAMPLES:
        yield f"calibration: only {num_distinct} different samples; statistics will follow these few texts"
    elif num_distinct < num_used:
        yield f"calibration: {num_used - num_distinct} of {num_used} samples repeat another one"
    mean_tokens = packed.token_ids.size / num_used
    if mean_tokens < MIN_MEAN_TOKENS:
        yield f"calibration: samples are very short ({mean_tokens:.1f} tokens on average); give longer ones"
    if renderer.num_double_bos:
        yield f"calibration: {renderer.num_double_bos} samples began with more than one BOS; one was kept"
