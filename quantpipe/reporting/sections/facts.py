"""Parity and quantization: what a run says of how the candidate was made."""

from collections.abc import Sequence

from quantpipe.gate.report import ParityRow
from quantpipe.reporting.exhibits import Column, Facts, Table
from quantpipe.reporting.report import ReportSection

COLUMNS = (
    Column("comparison"),
    Column("largest difference", "scientific"),
    Column("tolerance", "scientific"),
    Column("agrees"),
)


def parity_section(parity: Sequence[ParityRow]) -> ReportSection:
    """Ways to the same logits, two at a time."""
    rows = tuple((row.comparison, row.found, row.tolerance, "yes" if row.agrees else "NO") for row in parity)
    return ReportSection("parity", "Parity", (Table("Parity", COLUMNS, rows),) if rows else ())


def quantization_section(facts: Sequence[tuple[str, str]]) -> ReportSection:
    """Names and what they are, in order."""
    exhibits = (Facts(tuple(facts)),) if facts else ()
    return ReportSection("quantization", "Quantization", exhibits, "The base model is released as it is.")
