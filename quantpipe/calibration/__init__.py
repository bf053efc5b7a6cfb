"""Calibration sets: from a folder with ``set.yaml`` to exact blocks of token ids, with an account of every source.

A set has sources (``definition``); each yields samples (``jsonl``, ``python_stdlib``); samples become token ids that
start with at most one BOS and end with exactly one EOS (``rendering``); a seeded choice of them is laid end to end and
cut into blocks (``packing``). Light to import: transformers is loaded only when a tokenizer is opened.
"""

from quantpipe.calibration.account import SourceAccount, account_table
from quantpipe.calibration.build import build_calibration
from quantpipe.calibration.calibration_set import Budget, BuildContext, CalibrationSet, Document, digest_blocks
from quantpipe.calibration.definition import SetDefinition, load_set

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
