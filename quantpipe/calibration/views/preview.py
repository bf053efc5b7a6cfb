"""A few samples for a person to look at: redacted by every built-in rule, whatever the set says about redaction."""

import re
from dataclasses import dataclass

from quantpipe.calibration.calibration_set import Document
from quantpipe.calibration.definition.set_definition import SetDefinition
from quantpipe.calibration.redaction import Redactor, RedactSection, open_redactor
from quantpipe.calibration.redaction.placeholders import placeholder_key
from quantpipe.calibration.rows import UNKNOWN_LANGUAGE, Sample

MOST_CHARS = 600
# What may be part of a value that was cut in two: the last word, and a number in groups that leads up to it.
_CUT_VALUE = re.compile(r"[\d\s().+-]*\S{0,80}\Z")


@dataclass(frozen=True)
class Shown:
    """One sample as it may be shown: a title that says where it is from, and the redacted beginning of its text."""

    title: str
    text: str


def show_sample(sample: Sample, definition: SetDefinition, seed: int) -> Shown:
    """A sample as it was read."""
    redactor = open_redactor(_everything(definition.header.redact), definition.folder, definition.name, seed)
    found = redactor.redact_sample(sample)
    if isinstance(found.content, str):
        text = found.content
    else:
        text = "\n".join(f"[{message['role']}] {message['content']}" for message in found.content)
    label = definition.sources[sample.source].label
    return Shown(_title(sample.where, label, sample.language, found.domain), _cut(text))


def show_document(document: Document, text: str, definition: SetDefinition | None, seed: int) -> Shown:
    """A row as it stands in the blocks; ``text`` is what its tokens say; ``definition`` None: only blocks are known.

    Of a row that the end of a block cut, the last word is left out: a value that was cut in two is found by no rule.
    """
    if document.num_tokens_used < document.num_tokens:
        text = _CUT_VALUE.sub("", text, count=1)
    if definition is None:
        redactor = Redactor(RedactSection(), placeholder_key("preview", seed))
    else:
        redactor = open_redactor(_everything(definition.header.redact), definition.folder, definition.name, seed)
    size = f"{document.num_tokens_used:,} of {document.num_tokens:,} tokens"
    return Shown(
        f"{_title(document.where, document.source, document.language, document.domain)}, {size}",
        _cut(redactor.redact(text)),
    )


def preview_text(shown: tuple[Shown, ...]) -> str:
    """For a terminal: each sample under its title."""
    return "\n".join(f"--- {each.title}\n{each.text}" for each in shown)


def _everything(section: RedactSection) -> RedactSection:
    """The set's own patterns and regions, with all built-in rules."""
    return section.model_copy(update={"without": ()})


def _title(where: str, source: str, language: str, domain: str) -> str:
    known = [language] if language != UNKNOWN_LANGUAGE else []
    return ", ".join((where, *known, *([domain] if domain and domain != source else [])))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} ... ({len(text):,} characters)"
