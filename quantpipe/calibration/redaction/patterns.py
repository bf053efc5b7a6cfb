"""A set's own regular expressions, with a bound on the time that one of them may take on one text."""

from collections.abc import Iterator
from typing import Any

from quantpipe.calibration.redaction.scan import Span
from quantpipe.errors import DataError

MOST_S = 2.0  # per pattern and text, and once more for every million characters


class Pattern:
    """One regular expression. Looks at the text as it is written: nothing is folded."""

    def __init__(self, name: str, written: str) -> None:
        import regex  # its search can be stopped

        self.name = name
        self._compiled: Any = regex.compile(written)

    def find(self, text: str, where: str, most_s: float = MOST_S) -> Iterator[Span]:
        """All matches. Raises DataError, without the text, where the search takes too long or a match is empty."""
        try:
            for match in self._compiled.finditer(text, timeout=most_s * (1 + len(text) / 1e6)):
                if match.start() == match.end():
                    raise DataError(
                        f"{where}: redact.patterns.{self.name} matches nothing at all here; it must match text"
                    )
                yield Span(match.start(), match.end(), match.group())
        except TimeoutError:
            raise DataError(
                f"{where}: redact.patterns.{self.name} takes too long on this row; "
                "write it without repeats inside repeats, such as (a+)+"
            ) from None
