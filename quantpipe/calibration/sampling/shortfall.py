"""What is said where a set has too few tokens: how many there are, why not more, and what to change."""

from collections.abc import Iterator, Mapping, Sequence

from quantpipe.calibration.calibration_set import Budget
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.rows import SourceReading
from quantpipe.calibration.sampling.candidates import GROUP_CAP
from quantpipe.calibration.sampling.selection import Selection
from quantpipe.errors import DataError

Drops = Sequence[Mapping[str, int]]


def require_rows(definition: SetDefinition, num_left: Sequence[int], readings: Sequence[SourceReading]) -> None:
    """Raise DataError for a source of which reading left no row."""
    lines = []
    for index, (source, num_rows, reading) in enumerate(zip(definition.sources, num_left, readings, strict=True)):
        if num_rows:
            continue
        left = f": no row is left of {reading.num_rows:,}" if reading.num_rows else " gave no samples"
        why = f" ({counted(reading.dropped)})" if reading.dropped else ""
        lines.append(f"{definition.places[index]}: sources[{index}]: {source.label}{left}{why}; fill or remove it")
    if lines:
        raise DataError("\n".join(lines))


def check_size(
    definition: SetDefinition, selection: Selection, budget: Budget, allow_shortfall: bool, drops: Drops
) -> None:
    """Raise DataError where the budget is not filled, or a weighted source gives less than its share.

    ``drops``: for each source why rows of it were not used. With ``allow_shortfall`` one whole block suffices.
    """
    num_built = selection.num_tokens // budget.sequence_length
    if num_built == budget.num_sequences:
        short = [] if allow_shortfall else list(_short_sources(definition, selection, drops))
        if short:
            raise DataError("\n".join(short))
    elif not allow_shortfall or num_built == 0:
        raise DataError(_too_few(definition, selection, budget, num_built, drops))


def counted(counts: Mapping[str, int]) -> str:
    """Counts in words, such as ``3 empty, 12 near duplicate``."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _too_few(definition: SetDefinition, selection: Selection, budget: Budget, num_built: int, drops: Drops) -> str:
    total = {reason: sum(each.get(reason, 0) for each in drops) for each in drops for reason in each}
    why = f" after dropping rows: {counted(total)}" if counted(total) else ""
    num_sequences, length, num_there = budget.num_sequences, budget.sequence_length, selection.num_tokens
    if definition.header.packing == "truncate":
        asked = f"asked for {num_sequences:,} rows of {length} tokens or more"
        there = f"the set has {num_built:,}{why}"
    else:
        asked = f"asked for {num_sequences} x {length} = {budget.num_tokens:,} tokens"
        there = f"the set has {num_there:,}"
    if num_built == 0 and num_there == 0:
        return f"{definition.place}: {asked}; no row is left to use{why}; add samples"
    if num_built == 0:
        return (
            f"{definition.place}: {asked}; {there}, less than one sequence{why}; "
            f"lower calibration.sequence_length to at most {num_there}{_cap_advice(total)}, or add samples"
        )
    if definition.header.packing != "truncate":
        there = f"{there} ({num_built} x {length}){why}"
    return (
        f"{definition.place}: {asked}; {there}; lower calibration.num_sequences to {num_built}, lower "
        f"calibration.sequence_length{_cap_advice(total)}, or set calibration.allow_shortfall: true"
    )


def _short_sources(definition: SetDefinition, selection: Selection, drops: Drops) -> Iterator[str]:
    total_weight = sum(source.weight or 0.0 for source in definition.sources)
    found = zip(definition.sources, selection.num_tokens_asked, selection.num_tokens_held, drops, strict=True)
    for index, (source, asked, held, dropped) in enumerate(found):
        if source.weight is None or held >= asked:
            continue
        why = f" after dropping rows: {counted(dropped)}" if counted(dropped) else ""
        yield (
            f"{definition.places[index]}: sources[{index}]: {source.label}: its weight of {source.weight:g} in "
            f"{total_weight:g} asks for {asked:,} tokens, it has {held:,}{why}; lower its weight or the number of "
            f"sequences{_cap_advice(dropped)}, or set calibration.allow_shortfall: true"
        )


def _cap_advice(dropped: Mapping[str, int]) -> str:
    return ", raise max_group_frac" if dropped.get(GROUP_CAP) else ""
