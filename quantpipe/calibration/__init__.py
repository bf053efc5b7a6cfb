"""Calibration sets: from a folder with ``set.yaml`` to exact blocks of token ids, with an account of every source.

``definition`` says what a set may hold. ``build`` reads rows (``readers``) as samples (``samples``), leaves out what
overlaps an evaluation or is held out (``checks``), takes a seeded choice that fills the budget (``sampling``), replaces
personal data (``redaction``), renders token ids (``templates``), and lays them end to end in blocks. Light to import:
transformers is loaded only when a tokenizer is opened.
"""

from quantpipe.calibration.account import SourceAccount, account_table
from quantpipe.calibration.build import build_calibration
from quantpipe.calibration.calibration_set import Budget, BuildContext, CalibrationSet, Document, digest_blocks
from quantpipe.calibration.definition.set_definition import SetDefinition, load_set

__all__ = [
    "Budget",
    "BuildContext",
    "CalibrationSet",
    "Document",
    "SetDefinition",
    "SourceAccount",
    "account_table",
    "build_calibration",
    "digest_blocks",
    "load_set",
]
