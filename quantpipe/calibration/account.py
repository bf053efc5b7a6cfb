"""What became of every source, in tokens and samples: what was there, asked, used, cut, dropped and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SourceAccount:
    """What became of one source. Tokens count BOS and EOS.

    ``num_tokens_asked`` is its share of the budget. Available is what passed every check that looked at it; where not
    every row had to be looked at, ``is_estimate`` says that it is estimated from those that were. A truncated sample is
    one of which only the first tokens were used. ``dropped`` counts rows by reason, ``redacted`` replacements by rule.
    """

    name: str
    num_samples_available: int
    num_samples_used: int
    num_tokens_available: int
    num_tokens_used: int
    num_samples_truncated: int
    num_tokens_asked: int = 0
    domain: str = ""
    is_estimate: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)
    redacted: Mapping[str, int] = field(default_factory=dict)


COLUMNS = ("source", "asked", "available", "used", "samples", "truncated")


def account_table(accounts: Sequence[SourceAccount]) -> str:
    """The accounts as a table for a terminal: a line of tokens per source, below it what was dropped and redacted."""
    rows = [COLUMNS, *(_cells(account) for account in accounts)]
    if len(accounts) > 1:
        rows.append(_total(accounts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [_line(row, widths) for row in rows]
    for index, account in reversed(list(enumerate(accounts, start=1))):
        lines[index + 1 : index + 1] = list(_details(account))
    return "\n".join(lines)


def _cells(account: SourceAccount) -> tuple[str, ...]:
    return (
        account.name,
        f"{account.num_tokens_asked:,}",
        f"{'~' if account.is_estimate else ''}{account.num_tokens_available:,}",
        f"{account.num_tokens_used:,}",
        f"{account.num_samples_used:,} of {'~' if account.is_estimate else ''}{account.num_samples_available:,}",
        f"{account.num_samples_truncated:,}",
    )


def _total(accounts: Sequence[SourceAccount]) -> tuple[str, ...]:
    return _cells(
        SourceAccount(
            name="total",
            num_samples_available=sum(account.num_samples_available for account in accounts),
            num_samples_used=sum(account.num_samples_used for account in accounts),
            num_tokens_available=sum(account.num_tokens_available for account in accounts),
            num_tokens_used=sum(account.num_tokens_used for account in accounts),
            num_samples_truncated=sum(account.num_samples_truncated for account in accounts),
            num_tokens_asked=sum(account.num_tokens_asked for account in accounts),
            is_estimate=any(account.is_estimate for account in accounts),
        )
    )


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *numbers = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join((first, *numbers)).rstrip()


def _details(account: SourceAccount) -> Iterator[str]:
    for title, counts in (("dropped", account.dropped), ("redacted", account.redacted)):
        found = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
        if found:
            yield f"  {title}: {found}"
