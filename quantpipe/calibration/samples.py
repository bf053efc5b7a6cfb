"""Older home of what ``rows`` holds."""

from quantpipe.calibration.rows import MOST_SHOWN, Message, RowProblems, Sample

__all__ = ["MOST_SHOWN", "Message", "RowProblems", "Sample"]
