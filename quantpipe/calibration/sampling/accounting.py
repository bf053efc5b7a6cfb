"""From what was counted on the way to the account of each source."""

from collections.abc import Mapping, Sequence

from quantpipe.calibration.account import SourceAccount
from quantpipe.calibration.definition.sources import Source
from quantpipe.calibration.rows import SourceReading
from quantpipe.calibration.sampling.candidates import Candidate, Candidates, SourceTally
from quantpipe.calibration.sampling.cells import Cell
from quantpipe.calibration.sampling.packing import Piece
from quantpipe.calibration.sampling.selection import Selection


def dropped_rows(reading: SourceReading, tally: SourceTally) -> dict[str, int]:
    """Why rows were not used, from the first step to the last."""
    dropped = reading.dropped + tally.dropped
    order = [*sorted(reading.dropped), *sorted(set(tally.dropped) - set(reading.dropped))]
    return {reason: dropped[reason] for reason in order if dropped[reason]}


def source_accounts(
    sources: Sequence[Source],
    readings: Sequence[SourceReading],
    cells: Sequence[Sequence[Cell]],
    candidates: Candidates,
    selection: Selection,
    used: Sequence[tuple[Candidate, Piece]],
) -> tuple[SourceAccount, ...]:
    """One account for each source; ``used`` are the candidates in the blocks with the pieces taken of them."""
    return tuple(
        _account(
            source,
            dropped_rows(readings[index], candidates.tallies[index]),
            cells[index],
            candidates.tallies[index],
            selection.num_tokens_asked[index],
            selection.is_estimate[index],
            [piece for candidate, piece in used if candidate.source == index],
            dict(sorted(candidates.redactors[index].counts.items())),
        )
        for index, source in enumerate(sources)
    )


def _account(
    source: Source,
    dropped: Mapping[str, int],
    cells: Sequence[Cell],
    tally: SourceTally,
    num_tokens_asked: int,
    is_estimate: bool,
    pieces: Sequence[Piece],
    redacted: Mapping[str, int],
) -> SourceAccount:
    num_samples, num_tokens = tally.num_passed, tally.num_passed_tokens
    if is_estimate:  # of the rows that were looked at, the share that passed; the others are taken to be like them
        num_samples = round(num_samples * sum(cell.num_rows for cell in cells) / max(1, tally.num_rows))
        num_tokens = round(num_tokens * sum(cell.num_chars for cell in cells) / max(1, tally.num_chars))
    return SourceAccount(
        name=source.label,
        domain=source.known_domain,
        num_samples_available=num_samples,
        num_samples_used=len(pieces),
        num_tokens_available=num_tokens,
        num_tokens_used=sum(piece.num_taken for piece in pieces),
        num_samples_truncated=sum(piece.num_taken < len(piece.token_ids) for piece in pieces),
        num_tokens_asked=num_tokens_asked,
        is_estimate=is_estimate,
        dropped=dropped,
        redacted=redacted,
    )
