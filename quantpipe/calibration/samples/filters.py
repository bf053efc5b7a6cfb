"""Which rows and samples a source's ``filter`` lets through. Knows no file formats and no tokens."""

from collections.abc import Mapping
from typing import Any

from quantpipe.calibration.definition.mapping import Filter, canonical
from quantpipe.calibration.readers.values import ABSENT, lookup
from quantpipe.calibration.rows import Row, Sample, sample_text


def keeps_row(row: Row, rules: Filter) -> bool:
    """Whether the row has a wanted value in each field of ``where`` and no unwanted one in any of ``exclude``.

    A field that is a list has the value of each of its entries; a row without the field has none.
    """
    return all(_has(row.values, name, wanted) for name, wanted in rules.where.items()) and not any(
        _has(row.values, name, unwanted) for name, unwanted in rules.exclude.items()
    )


def keeps_sample(sample: Sample, rules: Filter) -> bool:
    """Whether the sample's text is neither too short nor too long."""
    if rules.min_chars is None and rules.max_chars is None:
        return True
    num_chars = len(sample_text(sample))
    return (rules.min_chars or 0) <= num_chars and (rules.max_chars is None or num_chars <= rules.max_chars)


def _has(values: Mapping[str, Any], name: str, wanted: tuple[str | None, ...]) -> bool:
    found = lookup(values, name)
    if found is ABSENT:
        return None in wanted
    return any(canonical(each) in wanted for each in (found if isinstance(found, (list, tuple)) else (found,)))
