"""Which items flipped: right by one model and wrong by the other. Names only, redacted; no text leaves here."""

from collections.abc import Iterator

from quantpipe.calibration.redaction.redactor import Redactor
from quantpipe.calibration.redaction.section import RedactSection
from quantpipe.evaluate.items import ItemResult, SuiteResult
from quantpipe.reporting.sections.suite import FlipRow

NEAR_TIE_NATS = 0.1  # a choice that leads by less is one that rounding may turn
REDACTION_KEY = b"report"


def flip_rows(base: SuiteResult, candidate: SuiteResult) -> tuple[FlipRow, ...]:
    """The flipped items of two results over the same items. What looks like personal data in a name is replaced."""
    return tuple(_flips(base, candidate))


def _flips(base: SuiteResult, candidate: SuiteResult) -> Iterator[FlipRow]:
    redactor = Redactor(RedactSection(), REDACTION_KEY)
    for before, after in zip(base.items, candidate.items, strict=True):
        if before.correct == after.correct:
            continue
        yield FlipRow(
            task=before.task,
            doc_id=redactor.redact(before.doc_id),
            domain=redactor.redact(before.domain),
            is_lost=before.correct,
            is_near_tie=is_near_tie(before, after),
            cluster=redactor.redact(before.cluster),
            slices={name: redactor.redact(value) for name, value in before.slices.items()},
        )


def is_near_tie(before: ItemResult, after: ItemResult) -> bool | None:
    """Whether the best choice of either model was hardly ahead of the next; None where no margin is known."""
    margins = [each.margin for each in (before, after) if each.margin is not None]
    return min(margins) < NEAR_TIE_NATS if margins else None
