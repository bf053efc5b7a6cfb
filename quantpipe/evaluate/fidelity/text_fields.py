"""What windows can be sliced by: the name of the text each is from, and what a recipe's patterns say of such names."""

import fnmatch
from collections.abc import Mapping, Sequence

from quantpipe.calibration.held_out.held_out_windows import SEVERAL
from quantpipe.errors import DataError, suggest
from quantpipe.evaluate.fidelity.windows import DOMAIN

Patterns = Mapping[str, Mapping[str, str]]


def fields_of(names: Sequence[str], patterns: Patterns) -> tuple[dict[str, str], ...]:
    """The fields of a window of each of these texts: its domain, and what ``patterns`` say of that; none of several."""
    fields = {name: {DOMAIN: name} for name in names if name != SEVERAL}
    for pattern, given in patterns.items():
        for name in fnmatch.filter(fields, pattern):
            fields[name] |= given
    return tuple(fields.get(name, {}) for name in names)


def check_patterns(patterns: Patterns, names: Sequence[str]) -> None:
    """DataError for a pattern that no text's name fits."""
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise DataError(f"evaluate.divergence.slices: no text is called '{pattern}'{suggest(pattern, set(names))}")
