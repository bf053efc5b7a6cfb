"""Redaction: values that must not reach the blocks are replaced by typed placeholders before a row is used."""

from quantpipe.calibration.redaction.section import RULE_NAMES, RedactSection

__all__ = ["RULE_NAMES", "RedactSection"]
