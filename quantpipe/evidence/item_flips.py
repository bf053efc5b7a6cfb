"""Which items flipped: right by one model and wrong by the other. Names only, redacted; no text leaves here."""

from collections.abc import Iterator

from quantpipe.calibration.redaction.redactor import Redactor
from quantpipe.calibration.redaction.section import RedactSection
from quantpipe.evaluate.comparison import Comparison, is_near_tie
from quantpipe.reporting.sections.suite import FlipRow

REDACTION_KEY = b"report"


def flip_rows(comparison: Comparison) -> tuple[FlipRow, ...]:
    """The flipped items of a comparison. What looks like personal data in a name is replaced."""
    return tuple(_flips(comparison))


def _flips(comparison: Comparison) -> Iterator[FlipRow]:
    redactor = Redactor(RedactSection(), REDACTION_KEY)
    for before, after in comparison.pairs:
        if before.correct == after.correct:
            continue
        yield FlipRow(
            task=before.task,
            doc_id=redactor.redact(before.doc_id),
            domain=redactor.redact(before.domain),
            is_lost=before.correct,
            is_near_tie=None if before.margin is None else is_near_tie((before, after)),
            cluster=redactor.redact(before.cluster),
            slices={name: redactor.redact(value) for name, value in before.slices.items()},
        )
