"""The costly steps between a pooled row and its token ids: duplicates, language, redaction, rendering.

Rows come one at a time, in an order that follows from their ranks, so that what is a duplicate of what, and every
count, follows from the rows and the seed alone.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quantpipe.calibration.checks.near_duplicates import NearDuplicates
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.redaction import Redactor
from quantpipe.calibration.rows import (
    BY_TEMPLATE,
    MOST_SHOWN,
    NOTHING_WRITTEN,
    UNKNOWN_LANGUAGE,
    RowError,
    RowProblems,
    Sample,
    sample_text,
)
from quantpipe.calibration.sampling.pool import Entry
from quantpipe.calibration.templates.renderer import Renderer
from quantpipe.calibration.text.language import detect
from quantpipe.calibration.text.normal_text import normal_digest
from quantpipe.errors import DataError

EXACT_DUPLICATE, NEAR_DUPLICATE = "exact duplicate", "near duplicate"
SHORT, GROUP_CAP = "shorter than a sequence", "over the group cap"
MOST_REFUSED = 1000  # where a template has refused so many rows and rendered none, the others are not tried


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row that may be used. ``where`` and the labels are its sample's; ``text_digest`` is of its text as it was."""

    rank: int
    where: str
    source: int
    group: str | None
    domain: str
    language: str
    text_digest: bytes
    token_ids: npt.NDArray[np.int64]


@dataclass
class SourceTally:
    """What came of one source's rows that were looked at; copies of a row count as rows.

    ``bad`` counts those among ``dropped`` that cannot be rendered; ``first_refusal`` says of one of them why.
    """

    num_rows: int = 0
    num_chars: int = 0
    num_passed: int = 0
    num_passed_tokens: int = 0
    num_rendered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    first_refusal: str = ""


class Candidates:
    """Turns pooled rows into candidates, and keeps the tally of each source."""

    def __init__(
        self,
        definition: SetDefinition,
        renderer: Renderer,
        redactors: Sequence[Redactor],
        problems: RowProblems,
        least_tokens: int = 1,
    ) -> None:
        """``redactors``: one for each source, which counts for it; ``least_tokens``: a shorter sample is dropped."""
        self.tallies = [SourceTally() for _ in definition.sources]
        self._definition = definition
        self._renderer = renderer
        self.redactors = redactors
        self._problems = problems
        self._least_tokens = least_tokens
        self._seen: set[bytes] = set()
        threshold = definition.header.near_duplicates
        self._near = NearDuplicates(threshold) if threshold is not None else None

    def prepare(self, entry: Entry[Sample]) -> Candidate | None:
        """The candidate that a row becomes; None where it is dropped, which its source's tally then counts."""
        sample, tally = entry.item, self.tallies[entry.item.source]
        tally.num_rows += entry.num_copies
        tally.num_chars += entry.num_chars * entry.num_copies
        tally.dropped[EXACT_DUPLICATE] += entry.num_copies - 1
        text = sample_text(sample)
        digest = normal_digest(text)
        try:
            if self._least_tokens > 1 and not self._can_be_long_enough(sample, tally):
                return None
            return self._prepared(entry, text, digest, tally)
        except RowError as error:
            self._drop_refused(sample, error, tally)
            return None

    def _prepared(self, entry: Entry[Sample], text: str, digest: bytes, tally: SourceTally) -> Candidate | None:
        sample = entry.item
        if digest in self._seen:
            tally.dropped[EXACT_DUPLICATE] += 1
            return None
        self._seen.add(digest)
        if self._near is not None and not self._near.is_new(text):
            tally.dropped[NEAR_DUPLICATE] += 1
            return None
        language = self._language(sample, text)
        sample = self.redactors[sample.source].redact_sample(sample)
        token_ids = self._token_ids(sample, tally)
        if token_ids is None:
            return None
        return Candidate(
            entry.rank,
            sample.where,
            sample.source,
            sample.group,
            sample.domain,
            language,
            digest,
            np.array(token_ids, dtype=np.int64),
        )

    def drop_entry(self, entry: Entry[Sample], reason: str) -> None:
        """Count a row that is dropped before any check."""
        tally = self.tallies[entry.item.source]
        tally.num_rows += entry.num_copies
        tally.num_chars += entry.num_chars * entry.num_copies
        tally.dropped[reason] += entry.num_copies

    def drop_candidate(self, candidate: Candidate, reason: str) -> None:
        """Count a candidate that passed every check and is dropped nevertheless."""
        tally = self.tallies[candidate.source]
        tally.num_passed -= 1
        tally.num_passed_tokens -= len(candidate.token_ids)
        tally.dropped[reason] += 1

    def _language(self, sample: Sample, text: str) -> str:
        if sample.language == UNKNOWN_LANGUAGE and self._definition.sources[sample.source].detects_language:
            return detect(text, self._definition.header.languages)
        return sample.language

    def raise_if_refused(self) -> None:
        """Raise DataError with one line for each row that could not be rendered, unless such rows are dropped."""
        self._problems.lines[:] = self._refused
        self._problems.raise_if_any()

    def _can_be_long_enough(self, sample: Sample, tally: SourceTally) -> bool:
        """Whether a row has the tokens before redaction: of short rows nearly all end here, before the slow checks."""
        most = self._renderer.most_tokens(sample)
        if most is None or most >= self._least_tokens:
            most = self._renderer.num_tokens(sample)
        if most < self._least_tokens:
            tally.num_rendered += 1
            tally.dropped[SHORT] += 1
            return False
        return True

    def raise_if_none_survived(self) -> None:
        """Raise DataError for a source of which the template refused every row that came to it."""
        for index, tally in enumerate(self.tallies):
            num_refused = tally.bad[BY_TEMPLATE] + tally.bad[NOTHING_WRITTEN]
            if num_refused and not tally.num_rendered:
                source = f"{self._definition.places[index]}: sources[{index}]: {self._definition.sources[index].label}"
                rows = "1 row" if num_refused == 1 else f"{num_refused:,} rows"
                raise DataError(f"{source}: no row survived the template ({rows} tried); {tally.first_refusal}")

    def _drop_refused(self, sample: Sample, error: RowError, tally: SourceTally) -> None:
        """Count a row that cannot be rendered. Raises DataError where there are as many as an error shows."""
        self._problems.add(sample.where, str(error))
        tally.dropped[error.reason] += 1
        tally.bad[error.reason] += 1
        tally.first_refusal = tally.first_refusal or f"{sample.where}: {error}"
        if self._problems.num_rows >= MOST_SHOWN and not self._problems.is_dropping:
            raise DataError("\n".join([*self._refused, "... the other rows were not tried"]))
        if tally.bad.total() >= MOST_REFUSED:
            self.raise_if_none_survived()

    @property
    def _refused(self) -> list[str]:
        """The problems by file and number of the row: rows are looked at in another order."""
        return sorted(self._problems.lines, key=lambda line: [_number(part) for part in re.split(r"(\d+)", line)])

    def _token_ids(self, sample: Sample, tally: SourceTally) -> list[int] | None:
        token_ids = self._renderer.encode(sample)
        tally.num_rendered += 1
        if len(token_ids) < self._least_tokens:
            tally.dropped[SHORT] += 1
            return None
        tally.num_passed += 1
        tally.num_passed_tokens += len(token_ids)
        return token_ids


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdecimal() else (0, part)
