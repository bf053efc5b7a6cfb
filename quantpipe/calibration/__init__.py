"""Calibration sets: from a folder with ``set.yaml`` to exact blocks of token ids, with an account of every source.

A set has sources (``definition``); each yields samples (``jsonl``, ``python_stdlib``); samples become token ids that
start with at most one BOS and end with exactly one EOS (``rendering``); a seeded choice of them is laid end to end and
cut into blocks (``packing``). Light to import: transformers is loaded only when a tokenizer is opened.
"""

from quantpipe.calibration.build import CalibrationSet, build_calibration
from quantpipe.calibration.definition import SetDefinition, load_set
from quantpipe.calibration.packing import SourceAccount

__all__ = ["CalibrationSet", "SetDefinition", "SourceAccount", "build_calibration", "load_set"]
