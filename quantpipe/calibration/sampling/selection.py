"""Which rows fill the budget: tokens per source by weight, within a source by stratum, exactly.

Knows rows as candidates with a number of tokens. A stratum that runs dry leaves its share to the others of its source;
so does a source, where that is allowed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.definition.sources import RowKeys, Source
from quantpipe.calibration.sampling.candidates import Candidate, Candidates
from quantpipe.calibration.sampling.cells import Cell, GroupCap
from quantpipe.calibration.sampling.quotas import LEAST_TOKENS, Portions, divide, join_small

ESTIMATE_ROWS = 16  # rows of each stratum from which the number of its tokens is estimated
LOOK_AT_REST_CHARS = 1 << 19  # smaller sets are looked at whole, which makes their accounts exact


@dataclass(frozen=True)
class Selection:
    """The chosen candidates in rank order with the tokens used of each, and what each source was asked and gave."""

    chosen: tuple[tuple[Candidate, int], ...]
    num_tokens_asked: tuple[int, ...]
    num_tokens_held: tuple[int, ...]
    is_estimate: tuple[bool, ...]
    notes: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.num_tokens_held)


def select(
    definition: SetDefinition, cells: Sequence[Sequence[Cell]], candidates: Candidates, num_tokens: int, unit: int
) -> Selection:
    """Choose from the cells of each source. ``unit`` divides ``num_tokens``, and so do all quotas.

    Raises PoolTooSmallError where rows are needed that a pool turned away.
    """
    sources = definition.sources
    shares = [_cell_shares(definition, of_source, candidates) for of_source in cells]
    source_shares = _source_shares(sources, shares)
    num_units, least = num_tokens // unit, LEAST_TOKENS if unit == 1 else 1
    shared = divide(num_units, source_shares) if any(source_shares) else [0] * len(sources)
    asked = [part * unit for part in join_small(shared, [0] * len(sources), least)]
    for source, of_source, tokens in zip(sources, cells, asked, strict=True):
        _cap_groups(source, of_source, tokens, unit)

    def filling(source: int) -> Portions:
        def fill(index: int, amount: int) -> int:
            return cells[source][index].fill(amount * unit, candidates) // unit

        spread = shares[source] if definition.header.allocation == "proportional" else [1.0] * len(cells[source])
        return Portions(spread, fill, least)

    portions = [filling(index) for index in range(len(sources))]
    total = Portions(source_shares, lambda index, amount: portions[index].grow_to(amount), least)
    total.grow_to(num_units)
    chosen = [
        piece
        for of_source, portion in zip(cells, portions, strict=True)
        for cell, held in zip(of_source, portion.held, strict=True)
        for piece in cell.taken(held * unit)
    ]
    _look_at_rest(cells, candidates)
    return Selection(
        chosen=tuple(sorted(chosen, key=lambda piece: piece[0].rank)),
        num_tokens_asked=tuple(asked),
        num_tokens_held=tuple(held * unit for held in total.held),
        is_estimate=tuple(not all(cell.is_exhausted for cell in of_source) for of_source in cells),
        notes=(*_too_small(sources, shared, asked), *_notes(definition, cells, portions)),
    )


def group_frac_of(source: Source) -> float:
    """Largest share of a source's tokens that one group may give; 1 where it knows no groups."""
    return source.group_frac if isinstance(source, RowKeys) else 1.0


def _cell_shares(definition: SetDefinition, cells: Sequence[Cell], candidates: Candidates) -> list[float]:
    """The estimated tokens of each stratum, where something depends on them."""
    is_weighted = definition.sources[0].weight is not None
    if len(cells) == 1 and (is_weighted or len(definition.sources) == 1):
        return [1.0]
    return [cell.estimated_tokens(candidates, ESTIMATE_ROWS) for cell in cells]


def _source_shares(sources: Sequence[Source], shares: Sequence[Sequence[float]]) -> list[float]:
    """The weights; without any, the tokens that there are, so that every row is equally likely."""
    return [
        source.weight if source.weight is not None else sum(of_cells)
        for source, of_cells in zip(sources, shares, strict=True)
    ]


def _cap_groups(source: Source, cells: Sequence[Cell], num_tokens: int, unit: int) -> None:
    frac = group_frac_of(source)
    if frac >= 1.0:
        return
    least = LEAST_TOKENS if unit == 1 else 1
    cap = GroupCap(max(least, int(frac * num_tokens / unit)) * unit)
    for cell in cells:
        cell.cap = cap


def _look_at_rest(cells: Sequence[Sequence[Cell]], candidates: Candidates) -> None:
    every = [cell for of_source in cells for cell in of_source]
    if all(cell.is_complete for cell in every) and sum(cell.num_chars for cell in every) <= LOOK_AT_REST_CHARS:
        for cell in every:
            cell.look_at_rest(candidates)


def _too_small(sources: Sequence[Source], shared: Sequence[int], asked: Sequence[int]) -> Iterator[str]:
    for source, share, tokens in zip(sources, shared, asked, strict=True):
        if share and not tokens:
            yield f"calibration: {source.label}: a share of {share} tokens is too small for a row; another gives them"


def _notes(definition: SetDefinition, cells: Sequence[Sequence[Cell]], portions: Sequence[Portions]) -> Iterator[str]:
    for source, of_source, portion in zip(definition.sources, cells, portions, strict=True):
        dry = [of_source[index] for index in portion.dry]
        if dry and len(dry) < len(of_source):
            names = ", ".join("/".join(cell.stratum) for cell in dry[:5]) + (", ..." if len(dry) > 5 else "")
            strata = "1 stratum holds" if len(dry) == 1 else f"{len(dry)} strata hold"
            yield f"calibration: {source.label}: {strata} less than its share ({names}); the others give the rest"
        num_chosen, num_capped = sum(len(cell.chosen) for cell in of_source), sum(cell.num_capped for cell in of_source)
        if 2 * num_capped > num_chosen:
            share = f"max_group_frac {group_frac_of(source):g}"
            text = f"{source.label}: {share} has cut {num_capped:,} of {num_chosen:,} samples short"
            yield f"calibration: {text}; raise it, or ask for more tokens"
