"""The rows that a set holds out, as windows of tokens to evaluate on: rendered and redacted like those of a build.

A pass of its own over the set. Which windows come out follows from the set, its ``holdout`` and the tokenizer, not from
what is calibrated on, nor with which seed. Memory follows the number of tokens asked for.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantpipe.calibration.calibration_set import BuildContext
from quantpipe.calibration.checks.holdout import holdout_key, is_held_out
from quantpipe.calibration.checks.leakage import EvalText
from quantpipe.calibration.definition.set_definition import Holdout, SetDefinition
from quantpipe.calibration.held_out.held_out_windows import SEVERAL, Cutter, DomainPools, HeldOutWindow, cut_windows
from quantpipe.calibration.redaction import Redactor, open_redactor
from quantpipe.calibration.rows import RowProblems, SourceReading, sample_text
from quantpipe.calibration.samples.sample_stream import read_samples
from quantpipe.calibration.sampling.candidates import Candidates
from quantpipe.calibration.sampling.pool import ranking
from quantpipe.calibration.sampling.set_renderer import open_renderer
from quantpipe.calibration.text.normal_text import normal_text
from quantpipe.errors import DataError
from quantpipe.report import Progress, no_progress

SEED = 0  # of placeholders and of text that a model writes: calibration.seed changes no window
CHARS_PER_TOKEN = 16
LONGEST_NAME, MOST_WORDS = 40, 4  # a longer name of a domain may be text of a row
POOL_GROWTH = 4


@dataclass(frozen=True)
class HeldOut:
    """Windows of one length, and the texts of the rows in them, for calibration rows to be compared with.

    ``notes`` are sentences for the user about what is not measured.
    """

    windows: tuple[HeldOutWindow, ...]
    texts: tuple[EvalText, ...]
    notes: tuple[str, ...] = ()

    def by_domain(self) -> dict[str, list[tuple[int, ...]]]:
        """The windows of each domain, domains by name."""
        names = sorted({window.domain for window in self.windows})
        return {name: [each.token_ids for each in self.windows if each.domain == name] for name in names}


def read_held_out(
    definition: SetDefinition,
    tokenizer_folder: Path,
    num_windows: int,
    window_tokens: int,
    context: BuildContext = BuildContext(),  # noqa: B008  # frozen and empty
    progress: Progress = no_progress,
    equally: bool = False,
) -> HeldOut:
    """``num_windows`` windows of ``window_tokens`` from the rows that the set holds out.

    Domains have windows in proportion to their held-out characters (``equally``: as many each), by largest remainders;
    of equal ones those come first whose names have the lowest hash. A domain too small for a window gets none.
    Rows are taken in an order that follows from their texts, without near duplicates. Those of one domain are laid end
    to end and cut, each closed by its EOS; with ``packing: truncate`` each window is the beginning of one row. Of
    domains too small for the windows they would have the rest is laid end to end, and makes windows of several domains.
    ``context`` says where libraries may cache and who writes text for ``kind: self``; its evaluation texts are not
    looked at. DataError where the set holds nothing out or too little, with the counts.
    """
    holdout = definition.header.holdout
    if holdout is None:
        raise DataError(f"{definition.file}: nothing is held out to evaluate on; add holdout: {{frac: 0.1}}")
    renderer = open_renderer(definition, tokenizer_folder)
    max_chars = CHARS_PER_TOKEN * num_windows * window_tokens
    while True:
        pools = _read(definition, holdout, max_chars, context, progress)
        is_dropping, is_truncating = definition.header.bad_rows == "drop", definition.header.packing == "truncate"
        section = definition.header.redact
        redactors = [open_redactor(section, definition.folder, definition.name, SEED) for _ in definition.sources]
        problems = RowProblems(is_dropping=is_dropping)
        candidates = Candidates(definition, renderer, redactors, problems, window_tokens if is_truncating else 1)
        whole = {name: pool.limit is None for name, pool in pools.items()}
        cutters = [
            Cutter(
                name,
                1.0 if equally else max(1, pool.num_chars),
                deque(pool.entries()),
                candidates,
                window_tokens,
                is_truncating,
            )
            for name, pool in pools.items()
        ]
        windows = cut_windows(cutters, num_windows, window_tokens)
        candidates.raise_if_refused()
        if any(cutter.is_dry and not whole[cutter.domain] for cutter in cutters):
            max_chars *= POOL_GROWTH
            continue
        if len(windows) < num_windows:
            num_rows = sum(pool.num_rows for _, pool in pools.items())
            raise DataError(_too_few(definition, num_rows, len(windows), num_windows, window_tokens))
        texts = [text for cutter in cutters for text in _texts(cutter, definition.name)]
        return HeldOut(tuple(windows), tuple(texts), tuple(_notes(pools, cutters, redactors, num_windows)))


def _read(
    definition: SetDefinition, holdout: Holdout, max_chars: int, context: BuildContext, progress: Progress
) -> DomainPools:
    """The held-out rows of each domain, as far as they fit its pool. DataError for rows that cannot be used."""
    problems, rank = RowProblems(is_dropping=definition.header.bad_rows == "drop"), ranking(SEED)
    pools = DomainPools(max_chars)
    for index, source in enumerate(progress(definition.sources, len(definition.sources), "held-out rows")):
        for sample in read_samples(
            source, index, definition.folder, problems, SourceReading(), context.work_folder, SEED, context.generate
        ):
            text = sample_text(sample)
            if is_held_out(holdout_key(sample.group, text), holdout.salt, holdout.frac):
                pools.pool(sample.domain).offer(rank(normal_text(text)), sample, len(text))
    problems.raise_if_any()
    return pools


def _texts(cutter: Cutter, set_name: str) -> Iterator[EvalText]:
    """The rows that were used, as texts that no calibration row may overlap."""
    for sample in cutter.used:
        yield EvalText(f"held-out rows of {set_name}", sample.where, sample_text(sample), is_held_out=True)


def _notes(
    pools: DomainPools, cutters: Sequence[Cutter], redactors: Sequence[Redactor], num_windows: int
) -> Iterator[str]:
    """Which domains have no window, the largest of them by name, as far as that does not look like data."""
    named = [(name, pool) for name, pool in pools.items() if name != SEVERAL or not pools.has_more]
    measured = {cutter.domain for cutter in cutters if cutter.is_measured}
    missing = sorted((each for each in named if each[0] not in measured), key=lambda each: -each[1].num_chars)
    if not missing:
        return
    num_chars = sum(pool.num_chars for _, pool in pools.items())
    name, largest = missing[0]
    label = redactors[largest.entries()[0].item.source].redact(name)
    is_name = len(label) <= LONGEST_NAME and len(label.split()) <= MOST_WORDS
    shown = label if is_name and label else f"(a name of {len(name)} characters)"
    of_text = f"{100 * largest.num_chars / num_chars:.2g} % of the held-out text"
    more = "more than " if pools.has_more else ""
    yield (
        f"held-out rows: {num_windows} windows, {more}{len(named)} domains: "
        + (f"1 is not measured, {shown} ({of_text})" if len(missing) == 1 else "")
        + (f"{len(missing)} are not measured, such as {shown} ({of_text})" if len(missing) > 1 else "")
        + "; raise num_windows to measure more"
    )


def _too_few(definition: SetDefinition, num_rows: int, num_found: int, num_windows: int, window_tokens: int) -> str:
    return (
        f"{definition.file}: the {num_rows:,} rows that holdout keeps out give {num_found} windows of {window_tokens} "
        f"tokens; {num_windows} are needed, so raise holdout.frac, or lower num_windows or window_tokens"
    )
