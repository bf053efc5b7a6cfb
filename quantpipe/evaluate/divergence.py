"""How far a candidate's next-token distributions are from the baseline's, teacher-forced on the same text.

Shapes: T positions of one window, W windows, N positions of all windows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from quantpipe.errors import DataError
from quantpipe.evaluate.fidelity.by_position import PositionRow, position_rows, slope_per_doubling
from quantpipe.evaluate.fidelity.figures import SliceRow, figures, slice_rows, sliced_figures
from quantpipe.evaluate.fidelity.reference import Reference, compare_with_reference
from quantpipe.evaluate.fidelity.windows import Compared
from quantpipe.evaluate.intervals import DEFAULT_CONFIDENCE, Interval
from quantpipe.evaluate.served import ServedModel, TextCodec
from quantpipe.evaluate.window_logits import Positions, compare_window
from quantpipe.evaluate.window_rows import WindowRow
from quantpipe.gate.judge import Measurement
from quantpipe.report import Progress, no_progress


@dataclass(frozen=True)
class DivergenceResult:
    """The gate's measurements, and what else is worth showing. ``windows`` is in the order of the windows given.

    ``measurements`` are of all text, then of each slice, the worst domain last.
    ``top_k`` says that the KL is against a stored baseline, with so many tokens of each position, and so a lower bound;
    None where both models were run. ``slope`` is the change of KL, in nats, for each doubling of the text before a
    position; None in short windows.
    """

    measurements: tuple[Measurement, ...]
    windows: tuple[Compared, ...]
    base_perplexity: float
    cand_perplexity: float
    median_kl: float
    p99_kl: float
    max_kl: float = 0.0
    slices: tuple[SliceRow, ...] = ()
    positions: tuple[PositionRow, ...] = ()
    slope: tuple[float, Interval] | None = None
    top_k: int | None = None


def measure_divergence(
    base: ServedModel,
    cand: ServedModel,
    windows: Sequence[Sequence[int]],
    confidence: float = DEFAULT_CONFIDENCE,
    progress: Progress = no_progress,
    slices: Sequence[Mapping[str, str]] = (),
) -> DivergenceResult:
    """Perplexity ratio, KL(base || candidate) and top-1 agreement over windows of token ids, of all and by slice.

    Both models read each window whole; position t is judged on predicting token t + 1. Distributions are compared in
    float64 from the engines' float32 logits, one chunk of each model in memory at a time. Intervals take the windows
    as the independent units: Student's t over window means (of the log ratio for perplexity), Wilson's score interval
    with the windows' design effect for the agreement, order statistics for a quantile. ``slices`` are the fields of
    each window, such as its domain. DataError where a model returns logits that are not finite or not one row of the
    same width for every position.
    """

    def compare(window: Sequence[int], index: int) -> Positions:
        return compare_window(base, cand, window, f"window {index}")

    return _measure(compare, windows, confidence, progress, slices, None)


def measure_against(
    reference: Reference,
    cand: ServedModel,
    windows: Sequence[Sequence[int]],
    confidence: float = DEFAULT_CONFIDENCE,
    progress: Progress = no_progress,
    slices: Sequence[Mapping[str, str]] = (),
) -> DivergenceResult:
    """The same against a stored baseline of these windows, which is not run again.

    KL is a lower bound, and named so that it is never compared with the other: ``mean_kl_topk``. Perplexity and
    agreement are what they are with both models. DataError where the reference is of other windows.
    """
    reference.check_windows(windows)

    def compare(window: Sequence[int], index: int) -> Positions:
        return compare_with_reference(reference, index, cand, window, f"window {index}")

    return _measure(compare, windows, confidence, progress, slices, reference.top_k)


def _measure(
    compare: Callable[[Sequence[int], int], Positions],
    windows: Sequence[Sequence[int]],
    confidence: float,
    progress: Progress,
    slices: Sequence[Mapping[str, str]],
    top_k: int | None,
) -> DivergenceResult:
    check_windows(windows)
    fields = list(slices) if slices else [{}] * len(windows)
    compared = [
        _kept(compare(window, index), of_window)
        for (index, window), of_window in zip(
            progress(enumerate(windows), total=len(windows), label="divergence windows"), fields, strict=True
        )
    ]
    return _summarise(compared, confidence, top_k)


def _kept(positions: Positions, fields: Mapping[str, str]) -> Compared:
    row = WindowRow(
        base_nll=float(positions.base_nll_T.mean()),
        cand_nll=float(positions.cand_nll_T.mean()),
        mean_kl=float(positions.kl_T.mean()),
        max_kl=float(positions.kl_T.max()),
        top1_agreement=float(positions.agrees_T.mean()),
        num_positions=len(positions.kl_T),
    )
    return Compared(row, positions.kl_T, fields)


def check_windows(windows: Sequence[Sequence[int]]) -> None:
    """DataError unless there are two windows or more, all of one length."""
    if len(windows) < 2:
        raise DataError(f"divergence: {len(windows)} windows of text; at least 2 are needed for an interval")
    lengths = {len(window) for window in windows}
    if len(lengths) > 1 or min(lengths) < 2:
        raise DataError(f"divergence: windows of {sorted(lengths)} tokens; all must have one length of at least 2")


def _summarise(compared: Sequence[Compared], confidence: float, top_k: int | None) -> DivergenceResult:
    rows = [each.row for each in compared]
    kl_WT = np.stack([each.kl_T for each in compared])
    return DivergenceResult(
        measurements=(*figures(compared, {}, confidence, top_k), *sliced_figures(compared, confidence, top_k)),
        windows=tuple(compared),
        base_perplexity=math.exp(np.mean([row.base_nll for row in rows])),
        cand_perplexity=math.exp(np.mean([row.cand_nll for row in rows])),
        median_kl=float(np.median(kl_WT)),
        p99_kl=float(np.quantile(kl_WT, 0.99)),
        max_kl=float(kl_WT.max()),
        slices=slice_rows(compared),
        positions=position_rows(kl_WT, confidence),
        slope=slope_per_doubling(kl_WT, confidence),
        top_k=top_k,
    )


def windows_from_text(path: Path, tokenizer: TextCodec, num_windows: int, window_tokens: int) -> list[list[int]]:
    """``num_windows`` windows of ``window_tokens`` ids from a text file, or from a folder's ``.txt`` files by name.

    Windows of one document are consecutive and do not overlap; documents take turns, so that a folder's domains are
    all covered. DataError, with the counts, where there is no text or too little of it.
    """
    return [window for _, window in named_windows(path, tokenizer, num_windows, window_tokens)]


def named_windows(
    path: Path, tokenizer: TextCodec, num_windows: int, window_tokens: int
) -> list[tuple[str, list[int]]]:
    """The same windows, each with the name of its file (without the ending)."""
    documents = text_files(path)
    windows_of = [
        [(file.stem, window) for window in _cut(tokenizer.encode(read_text(file)), window_tokens)] for file in documents
    ]
    by_turns = [window for turn in zip_longest(*windows_of) for window in turn if window is not None]
    if len(by_turns) < num_windows:
        raise DataError(
            f"{path}: {len(documents)} documents give {len(by_turns)} windows of {window_tokens} tokens; {num_windows} "
            "are needed, so add text or lower num_windows or window_tokens"
        )
    return by_turns[:num_windows]


def _cut(token_ids: Sequence[int], window_tokens: int) -> list[list[int]]:
    """The whole windows of a document; a shorter rest is left out."""
    last_start = len(token_ids) - window_tokens
    return [list(token_ids[start : start + window_tokens]) for start in range(0, last_start + 1, window_tokens)]


def text_files(path: Path) -> list[Path]:
    """The file at ``path``, or the ``.txt`` files of that folder by name. DataError where there are none."""
    if path.is_file():
        return [path]
    files = sorted(path.glob("*.txt")) if path.is_dir() else []
    if not files:
        raise DataError(f"{path}: not a text file or a folder with .txt files")
    return files


def read_text(file: Path) -> str:
    """The whole text of a file in UTF-8. DataError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text: {error}") from error
