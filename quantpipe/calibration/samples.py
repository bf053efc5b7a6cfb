"""One sample as its source yields it, and the list of what was wrong with rows. Knows no tokens.

Messages about rows name files, rows and fields, never what a row says: it may be a customer's text.
"""

from dataclasses import dataclass, field

from quantpipe.errors import DataError

MOST_SHOWN = 10
Message = dict[str, str]


@dataclass(frozen=True)
class Sample:
    """Plain text or a conversation; ``where`` (``file:row``) is how an error names it."""

    where: str
    content: str | tuple[Message, ...]


@dataclass
class RowProblems:
    """Rows that cannot be used: the first few in words, the rest counted, so that a large bad file stays cheap."""

    lines: list[str] = field(default_factory=list)
    num_rows: int = 0

    def add(self, where: str, text: str) -> None:
        self.num_rows += 1
        if len(self.lines) < MOST_SHOWN:
            self.lines.append(f"{where}: {text}")

    def raise_if_any(self) -> None:
        """Raise DataError with one line per row."""
        if not self.lines:
            return
        hidden = self.num_rows - len(self.lines)
        rest = [f"... and {hidden:,} more rows like these"] if hidden else []
        raise DataError("\n".join([*self.lines, *rest]))
