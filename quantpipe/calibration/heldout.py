"""The rows that a set holds out, as windows of tokens to evaluate on: rendered and redacted like those of a build.

A pass of its own over the set. Which windows come out follows from the set, its ``holdout``, the tokenizer and
``seed``, not from what is calibrated on. Memory follows the number of tokens asked for.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quantpipe.calibration.build import open_renderer
from quantpipe.calibration.calibration_set import BuildContext
from quantpipe.calibration.candidates import Candidates
from quantpipe.calibration.definition import Holdout, SetDefinition
from quantpipe.calibration.holdout import holdout_key, is_held_out
from quantpipe.calibration.leakage import EvalText
from quantpipe.calibration.normal_text import normal_text
from quantpipe.calibration.pool import Entry, Pool, ranking
from quantpipe.calibration.redaction import open_redactor
from quantpipe.calibration.rows import RowProblems, Sample, SourceReading, sample_text
from quantpipe.calibration.sample_stream import read_samples
from quantpipe.errors import DataError
from quantpipe.report import Progress, no_progress

SEVERAL = "several domains"
CHARS_PER_TOKEN = 16
POOL_GROWTH = 4
MOST_DOMAINS = 256  # rows of any further domain count as of several


@dataclass(frozen=True)
class HeldOutWindow:
    """Token ids to evaluate on, all of one domain; of rows that fill no window of their own, of several."""

    domain: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class HeldOut:
    """Windows of one length, and the texts of the rows in them, for calibration rows to be compared with."""

    windows: tuple[HeldOutWindow, ...]
    texts: tuple[EvalText, ...]

    def by_domain(self) -> dict[str, list[tuple[int, ...]]]:
        """The windows of each domain, domains by name."""
        names = sorted({window.domain for window in self.windows})
        return {name: [each.token_ids for each in self.windows if each.domain == name] for name in names}


def read_held_out(
    definition: SetDefinition,
    tokenizer_folder: Path,
    num_windows: int,
    window_tokens: int,
    seed: int = 0,
    context: BuildContext = BuildContext(),  # noqa: B008  # frozen and empty
    progress: Progress = no_progress,
) -> HeldOut:
    """``num_windows`` windows of ``window_tokens`` from the rows that the set holds out; domains take turns, by name.

    Rows are taken in an order that follows from their texts, without near duplicates. Those of one domain are laid end
    to end and cut, each closed by its EOS; with ``packing: truncate`` each window is the beginning of one row. Of
    domains too small for a further window the rest is laid end to end, and makes windows of several domains.
    ``context`` says where libraries may cache and who writes text for ``kind: self``, which ``seed`` is for; its
    evaluation texts are not looked at. DataError where the set holds nothing out or too little, with the counts.
    """
    holdout = definition.header.holdout
    if holdout is None:
        raise DataError(f"{definition.file}: nothing is held out to evaluate on; add holdout: {{frac: 0.1}}")
    renderer = open_renderer(definition, tokenizer_folder)
    max_chars = CHARS_PER_TOKEN * num_windows * window_tokens
    while True:
        pools = _read(definition, holdout, max_chars, seed, context, progress)
        problems = RowProblems(is_dropping=definition.header.bad_rows == "drop")
        section = definition.header.redact
        redactors = [open_redactor(section, definition.folder, definition.name, seed) for _ in definition.sources]
        is_truncating = definition.header.packing == "truncate"
        candidates = Candidates(definition, renderer, redactors, problems, window_tokens if is_truncating else 1)
        cutters = [
            _Cutter(name, deque(pools[name].entries()), candidates, window_tokens, is_truncating)
            for name in sorted(pools)
        ]
        windows = _in_turns(cutters, num_windows, window_tokens)
        problems.raise_if_any()
        if len(windows) == num_windows:
            texts = [text for cutter in cutters for text in cutter.texts(definition.name)]
            return HeldOut(tuple(windows), tuple(texts))
        if all(pool.limit is None for pool in pools.values()):
            raise DataError(_too_few(definition, pools, len(windows), num_windows, window_tokens))
        max_chars *= POOL_GROWTH


def _read(
    definition: SetDefinition, holdout: Holdout, max_chars: int, seed: int, context: BuildContext, progress: Progress
) -> dict[str, Pool[Sample]]:
    """The held-out rows of each domain, as far as they fit its pool. DataError for rows that cannot be used."""
    problems, rank = RowProblems(is_dropping=definition.header.bad_rows == "drop"), ranking(0)
    pools: dict[str, Pool[Sample]] = {}
    for index, source in enumerate(progress(definition.sources, len(definition.sources), "held-out rows")):
        for sample in read_samples(
            source, index, definition.folder, problems, SourceReading(), context.work_folder, seed, context.generate
        ):
            text = sample_text(sample)
            if is_held_out(holdout_key(sample.group, text), holdout.salt, holdout.frac):
                name = sample.domain if sample.domain in pools or len(pools) < MOST_DOMAINS else SEVERAL
                pool = pools.setdefault(name, Pool(max_chars))
                pool.offer(rank(normal_text(text)), sample, len(text))
    problems.raise_if_any()
    return pools


@dataclass
class _Cutter:
    """Rows of one domain in, windows out, as they are asked for; ``rest`` holds the tokens that fill no window yet."""

    domain: str
    waiting: deque[Entry[Sample]]
    candidates: Candidates
    window_tokens: int
    is_truncating: bool
    rest: list[int] = field(default_factory=list)
    used: list[Sample] = field(default_factory=list)
    label: str = SEVERAL

    def next_window(self) -> HeldOutWindow | None:
        """The next window; None where no row is left and the rest is too short."""
        while len(self.rest) < self.window_tokens:
            if not self.waiting:
                return None
            sample = self.waiting[0].item
            candidate = self.candidates.prepare(self.waiting.popleft())
            if candidate is not None:
                self.label = candidate.domain if sample.domain == self.domain else SEVERAL  # as it was redacted
                self.rest += candidate.token_ids.tolist()
                self.used.append(sample)
        window = HeldOutWindow(self.label, tuple(self.rest[: self.window_tokens]))
        self.rest = [] if self.is_truncating else self.rest[self.window_tokens :]
        return window

    def texts(self, set_name: str) -> Iterator[EvalText]:
        """The rows that were used, as texts that no calibration row may overlap."""
        for sample in self.used:
            yield EvalText(f"held-out rows of {set_name}", sample.where, sample_text(sample), is_held_out=True)


def _in_turns(cutters: list[_Cutter], num_windows: int, window_tokens: int) -> list[HeldOutWindow]:
    """At most ``num_windows``: one of each domain in turn, and then what is left of all of them, laid end to end."""
    windows: list[HeldOutWindow] = []
    turns = deque(cutters)
    while turns and len(windows) < num_windows:
        window = turns[0].next_window()
        if window is None:
            turns.popleft()
        else:
            windows.append(window)
            turns.rotate(-1)
    rest = [token_id for cutter in cutters for token_id in cutter.rest]
    for start in range(0, len(rest) - window_tokens + 1, window_tokens):
        if len(windows) < num_windows:
            windows.append(HeldOutWindow(SEVERAL, tuple(rest[start : start + window_tokens])))
    return windows


def _too_few(
    definition: SetDefinition, pools: dict[str, Pool[Sample]], num_found: int, num_windows: int, window_tokens: int
) -> str:
    num_rows = sum(pool.num_rows for pool in pools.values())
    return (
        f"{definition.file}: the {num_rows:,} rows that holdout keeps out give {num_found} windows of {window_tokens} "
        f"tokens; {num_windows} are needed, so raise holdout.frac, or lower num_windows or window_tokens"
    )
