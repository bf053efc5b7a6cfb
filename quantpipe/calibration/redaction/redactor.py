"""A text or sample with what the rules find replaced, and how often each rule found something."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from quantpipe.calibration.redaction.patterns import Pattern
from quantpipe.calibration.redaction.placeholders import placeholder, placeholder_key, read_secret
from quantpipe.calibration.redaction.rules import RULES
from quantpipe.calibration.redaction.scan import Scan, Span
from quantpipe.calibration.redaction.section import RedactSection
from quantpipe.calibration.rows import Sample


class Found(NamedTuple):
    """Characters [start, end) of a text, the rule that found them, and the value in its one way of writing."""

    start: int
    end: int
    rule: str
    value: str


class Redactor:
    """Replaces values by placeholders. One per source gives counts per source; equal keys give equal placeholders."""

    def __init__(self, section: RedactSection, key: bytes) -> None:
        self._finders = {name: RULES[name] for name in section.rules}
        self._patterns = [Pattern(name, written) for name, written in section.patterns.items()]
        self._regions = section.regions
        self._key = key
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of values replaced so far, by rule."""
        return dict(self._counts)

    def find(self, text: str, where: str = "text") -> list[Found]:
        """What would be replaced, in order, without overlaps.

        Spans that overlap become one, so that no part of any is left: it is named by the longest, then by the rule
        that is listed first. Raises DataError where a pattern of the set takes too long.
        """
        scan = Scan(text, self._regions)
        spans: list[tuple[Span, str]] = []
        for name, finder in self._finders.items():
            spans += [(scan.locate(span), name) for span in finder(scan)]
        spans += [(span, pattern.name) for pattern in self._patterns for span in pattern.find(text, where)]
        spans.sort(key=lambda pair: (pair[0].start, -pair[0].end))  # stable: rules stay in their order
        return _merged([Found(span.start, span.end, name, span.value) for span, name in spans])

    def redact(self, text: str, where: str = "text") -> str:
        """The text with placeholders; ``where`` is how an error names it."""
        pieces: list[str] = []
        end = 0
        for found in self.find(text, where):
            pieces += [text[end : found.start], placeholder(found.rule, found.value, self._key)]
            self._counts[found.rule] += 1
            end = found.end
        return "".join([*pieces, text[end:]]) if pieces else text

    def redact_sample(self, sample: Sample) -> Sample:
        """The sample with every text in it redacted; who speaks stays."""
        domain = self.redact(sample.domain, sample.where)
        if isinstance(sample.content, str):
            return sample._replace(content=self.redact(sample.content, sample.where), domain=domain)
        messages = tuple(
            {key: text if key == "role" else self.redact(text, sample.where) for key, text in message.items()}
            for message in sample.content
        )
        return sample._replace(content=messages, domain=domain)


def open_redactor(section: RedactSection, folder: Path, set_name: str, seed: int) -> Redactor:
    """A redactor with the key of this set and seed; ``redact.key_file`` is relative to ``folder``."""
    secret = read_secret(folder / section.key_file) if section.key_file else b""
    return Redactor(section, placeholder_key(set_name, seed, secret))


def _merged(found: list[Found]) -> list[Found]:
    merged: list[Found] = []
    longest = 0
    for item in found:
        if not merged or item.start >= merged[-1].end:
            merged.append(item)
            longest = item.end - item.start
            continue
        last = merged[-1]
        end = max(last.end, item.end)
        if item.end - item.start > longest:
            longest = item.end - item.start
            merged[-1] = Found(last.start, end, item.rule, item.value)
        else:
            merged[-1] = last._replace(end=end)
    return merged
