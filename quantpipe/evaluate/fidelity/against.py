"""A candidate against its base model as that runs, or as it was stored: the recipe says which."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantpipe.evaluate.divergence import DivergenceResult, measure_against, measure_divergence
from quantpipe.evaluate.fidelity.stored import stored_reference
from quantpipe.evaluate.served import ServedModel
from quantpipe.report import Reporter


def measure_fidelity(
    baseline: ServedModel,
    candidate: ServedModel,
    windows: Sequence[Sequence[int]],
    slices: Sequence[Mapping[str, str]],
    made_from: Sequence[Any] | None,
    cache_folder: Path,
    reporter: Reporter,
) -> DivergenceResult:
    """Compare both on windows of token ids; ``slices`` are the fields of each (``measure_divergence``).

    ``made_from``: what a stored baseline's numbers depend on beside the windows, as JSON data; None runs the baseline.
    """
    reporter.stage(f"divergence on {len(windows)} windows of {len(windows[0])} tokens")
    if made_from is None:
        return measure_divergence(baseline, candidate, windows, progress=reporter.progress, slices=slices)
    reference = stored_reference(baseline, made_from, windows, cache_folder, reporter)
    return measure_against(reference, candidate, windows, progress=reporter.progress, slices=slices)
