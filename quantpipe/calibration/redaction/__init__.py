"""Redaction: values that must not reach the blocks are replaced by typed placeholders before a row is used.

``section`` is what a set says about it; ``scan`` is a text as the rules see it; ``rules`` lists the rules, each a file.
"""

from quantpipe.calibration.redaction.redactor import Redactor, open_redactor
from quantpipe.calibration.redaction.rules import RULES, RULES_VERSION
from quantpipe.calibration.redaction.section import RULE_NAMES, RedactSection

__all__ = ["RULES", "RULES_VERSION", "RULE_NAMES", "RedactSection", "Redactor", "open_redactor"]
